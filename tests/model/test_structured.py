"""Structured answers of the embedded model, over HTTP, by the OpenAI SDK and by this project's client."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
import openai
import pydantic
import pytest

from logitwire import Client
from ops.process import ServerProcess

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]


class Owner(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=120)


class Pet(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    kind: Literal["cat", "dog", "bird"]
    colours: list[Literal["red", "green", "blue"]] = pydantic.Field(min_length=1, max_length=3)
    owner: Owner
    day: str = pydantic.Field(pattern=r"^20[0-9]{2}-[01][0-9]$")


MESSAGES: Any = [{"role": "user", "content": "Describe a pet."}]
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "pet", "schema": Pet.model_json_schema()}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    process = ServerProcess(tmp_path_factory.mktemp("server") / "log", THREADS="1")
    yield process
    assert process.stop() == 0


@pytest.fixture(scope="module")
def sdk(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def model(sdk: openai.OpenAI) -> str:
    return sdk.models.list().data[0].id


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_every_answer_at_temperature_1_is_one_that_pydantic_takes(
    sdk: openai.OpenAI, model: str, seed: int
) -> None:
    answer = sdk.chat.completions.create(
        model=model, messages=MESSAGES, response_format=FORMAT, temperature=1, seed=seed
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    assert choice.message.content is not None
    Pet.model_validate_json(choice.message.content)


# The SDK copies the answer by way of its own types, in which ``metadata`` holds strings only.
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_the_sdk_parses_a_model(sdk: openai.OpenAI, model: str) -> None:
    answer = sdk.chat.completions.parse(model=model, messages=MESSAGES, response_format=Pet, temperature=0)
    assert isinstance(answer.choices[0].message.parsed, Pet)


def test_rows_are_those_of_the_model_and_not_of_the_grammar(server: ServerProcess) -> None:
    client = Client(server.url)
    fields: dict[str, Any] = {"logits": "float32", "max_tokens": 12, "temperature": 0}
    plain = client.chat(MESSAGES, **fields)
    bound = client.chat(MESSAGES, response_format=FORMAT, **fields)
    assert plain.logits is not None
    assert bound.logits is not None
    np.testing.assert_allclose(bound.logits[0], plain.logits[0], atol=1e-3)
    assert np.isfinite(bound.logits).all()
    best = bound.logits.argmax(-1)
    assert (best != bound.token_ids).any()
    # Where the model's own choice is one that the grammar allows, it is taken.
    assert (best == bound.token_ids).any()
    rows = bound.logits.astype(np.float64)
    peaks = rows.max(-1)
    expected = rows[range(len(rows)), bound.token_ids] - peaks
    expected -= np.log(np.exp(rows - peaks[:, None]).sum(-1))
    np.testing.assert_allclose(bound.logprobs, expected, atol=1e-4)


def test_a_schema_that_cannot_be_obeyed_is_refused(sdk: openai.OpenAI, model: str) -> None:
    bad: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "strin"}}}
    with pytest.raises(openai.UnprocessableEntityError, match="strin") as caught:
        sdk.chat.completions.create(model=model, messages=MESSAGES, response_format=bad)
    assert caught.value.param == "response_format.json_schema.schema"


def test_schemas_beside_plain_requests_change_nothing_for_either(sdk: openai.OpenAI, model: str) -> None:
    def ask(place: int) -> str:
        schema = {
            "type": "object",
            "properties": {
                f"key{place}": {"enum": ["north", "south"]},
                "n": {"type": "integer", "minimum": 0, "maximum": 99},
            },
            "required": [f"key{place}", "n"],
            "additionalProperties": False,
        }
        form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        answer = sdk.chat.completions.create(
            model=model,
            messages=MESSAGES,
            response_format={"type": "text"} if place % 2 else form,
            temperature=0.8,
            seed=place,
            max_tokens=24,
        )
        assert answer.choices[0].message.content is not None
        return answer.choices[0].message.content

    alone = [ask(place) for place in range(4)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(ask, range(8)))
    assert together[:4] == alone
    assert all(text.startswith("{") for text in together[::2])
