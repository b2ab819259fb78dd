"""Other people's clients, and a real model that says what it likes."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest

from ops.process import ServerProcess
from tests.contract.noise import ODD_METADATA, loop_of_its_own
from tests.replies import TOOLS

pytestmark = [pytest.mark.model, pytest.mark.timeout(300), ODD_METADATA]

MESSAGES: Any = [{"role": "user", "content": "Name a city and the number of its rivers."}]

LIMIT = 200
"""Tokens that an answer of some 20 may take, since the grammar leaves the white space to the model."""


class City(pydantic.BaseModel):
    # Else the model may add members for ever, where a client does not ask for the strict form by itself.
    model_config = pydantic.ConfigDict(extra="forbid")

    kind: Literal["large", "small"]
    rivers: Literal[0, 1, 2]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    # Two threads that wait for each other are thirty times as slow where others want the cores too.
    process = ServerProcess(tmp_path_factory.mktemp("server") / "log", THREADS="1")
    yield process
    assert process.stop() == 0


@pytest.fixture
def sdk(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        yield client


@pytest.fixture
def asked(sdk: openai.OpenAI) -> dict[str, Any]:
    return {"model": sdk.models.list().data[0].id, "messages": MESSAGES}


def test_a_small_model_fills_any_pydantic_model(sdk: openai.OpenAI, asked: dict[str, Any]) -> None:
    for seed in range(2):
        answer = sdk.chat.completions.parse(
            **asked, response_format=City, temperature=1, seed=seed, max_completion_tokens=LIMIT
        )
        assert isinstance(answer.choices[0].message.parsed, City)
        assert answer.choices[0].finish_reason == "stop"


def test_langchain_fills_it_too(server: ServerProcess, asked: dict[str, Any]) -> None:
    from langchain_openai import ChatOpenAI

    with openai.DefaultHttpxClient() as http_client:
        chat = ChatOpenAI(
            model=asked["model"],
            base_url=f"{server.url}/v1",
            api_key="none",
            http_client=http_client,
            temperature=1,
            seed=1,
            max_completion_tokens=LIMIT,
        )
        assert isinstance(chat.with_structured_output(City).invoke("Describe a city."), City)
        calling = chat.with_structured_output(City, method="function_calling")
        assert isinstance(calling.invoke("Describe a city."), City)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_time"}}])
def test_a_forced_call_is_valid_at_any_temperature(
    sdk: openai.OpenAI, asked: dict[str, Any], choice: Any, stream: bool
) -> None:
    tools = json.loads(json.dumps(TOOLS))
    for tool in tools:
        # Else a small model may go on in a string for ever.
        (schema,) = tool["function"]["parameters"]["properties"].values()
        schema["enum"] = ["Oslo", "CET"]
    asked |= {
        "tools": tools,
        "tool_choice": choice,
        "temperature": 1,
        "seed": 3,
        "parallel_tool_calls": False,
    }
    asked["max_completion_tokens"] = LIMIT
    if stream:
        with sdk.chat.completions.stream(**asked) as events:
            answer: Any = events.until_done().get_final_completion()
    else:
        answer = sdk.chat.completions.create(**asked)
    (call,) = answer.choices[0].message.tool_calls
    names = {"get_weather": "city", "get_time": "zone"}
    assert list(json.loads(call.function.arguments)) == [names[call.function.name]]
    assert call.function.name == "get_time" or choice == "required"
    assert answer.choices[0].finish_reason == ("tool_calls" if choice == "required" else "stop")


def test_the_argmax_has_the_number_of_its_best_alternative(sdk: openai.OpenAI, asked: dict[str, Any]) -> None:
    for temperature in (0, 1):
        answer = sdk.chat.completions.create(
            **asked, max_tokens=12, temperature=temperature, logprobs=True, top_logprobs=3, seed=4
        )
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        for entry in logprobs.content:
            best = entry.top_logprobs[0]
            if entry.token == best.token:
                assert entry.logprob == best.logprob
            else:
                assert temperature
                assert entry.logprob <= best.logprob


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_stream_says_what_the_whole_answer_says(
    sdk: openai.OpenAI, asked: dict[str, Any], temperature: int
) -> None:
    asked |= {"max_tokens": 16, "temperature": temperature, "seed": 7}
    (whole,) = sdk.chat.completions.create(**asked).choices
    parts = [chunk.choices[0] for chunk in sdk.chat.completions.create(**asked, stream=True)]
    assert "".join(part.delta.content or "" for part in parts) == whole.message.content
    assert parts[-1].finish_reason == whole.finish_reason


def test_litellm_talks_to_it(
    server: ServerProcess, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    with loop_of_its_own(), openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        answer = litellm.completion(
            **asked | {"model": f"openai/{asked['model']}"}, client=client, max_tokens=6, temperature=0
        )
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens == 6
