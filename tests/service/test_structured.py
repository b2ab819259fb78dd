"""``response_format`` over HTTP, on scripted models that say no JSON by themselves."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pytest

from tests.conftest import Serve
from tests.fakes import hooked_load
from tests.serving import Reply, ServerThread

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["up", "down"]}, "on": {"type": "boolean"}},
    "required": ["kind", "on"],
    "additionalProperties": False,
}


def wanted(schema: Any = SCHEMA, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **fields}}


def content(reply: Reply) -> str:
    assert reply.status == 200, reply.body
    (choice,) = reply.json["choices"]
    assert choice["finish_reason"] == "stop"
    text: str = choice["message"]["content"]
    return text


def check(text: str) -> None:
    value = json.loads(text)
    assert list(value) == ["kind", "on"]
    assert value["kind"] in ("up", "down")
    assert isinstance(value["on"], bool)


@pytest.mark.parametrize("temperature", [0, 1, 2])
def test_an_answer_follows_its_schema(scripted: ServerThread, temperature: float) -> None:
    asked = wanted(strict=True, description="Which way.")
    for seed in range(3):
        reply = scripted.chat(response_format=asked, temperature=temperature, seed=seed, max_tokens=500)
        check(content(reply))


def test_json_object_is_an_object(scripted: ServerThread) -> None:
    reply = scripted.chat(response_format={"type": "json_object"}, max_tokens=30)
    assert reply.status == 200
    assert reply.json["choices"][0]["message"]["content"].startswith("{")


def test_a_seed_repeats_a_structured_answer(scripted: ServerThread) -> None:
    asked: dict[str, Any] = {"response_format": wanted(), "temperature": 1, "seed": 5, "n": 3}
    replies = [scripted.chat(return_token_ids=True, **asked).json["choices"] for _ in range(2)]
    assert replies[0] == replies[1]
    for choice in replies[0]:
        check(choice["message"]["content"])


def test_rows_stay_raw(scripted: ServerThread) -> None:
    fields: dict[str, Any] = {
        "return_logits": True,
        "logprobs": True,
        "max_tokens": 5,
        "logits_encoding": "b64_fp32",
    }
    (plain,) = scripted.chat(**fields).json["choices"]
    (bound,) = scripted.chat(response_format=wanted(), **fields).json["choices"]
    assert plain["token_ids"] != bound["token_ids"]
    assert plain["logits"] == bound["logits"]


def test_an_arrow_answer_follows_its_schema_too(scripted: ServerThread) -> None:
    accept = {"accept": "application/vnd.apache.arrow.stream"}
    reply = scripted.chat(accept, response_format=wanted(), max_tokens=500)
    table = pa.ipc.open_stream(reply.body).read_all()
    check(b"".join(table["token_bytes"].to_pylist()[:-1]).decode())


@pytest.mark.parametrize(
    ("value", "code", "param"),
    [
        ("json_object", "invalid_value", "response_format"),
        ([], "invalid_value", "response_format"),
        ({}, "invalid_value", "response_format.type"),
        ({"type": "yaml"}, "invalid_value", "response_format.type"),
        ({"type": "json_object", "frob": 1}, "unknown_parameter", "response_format.frob"),
        ({"type": "json_object", "json_schema": {}}, "invalid_value", "response_format.json_schema"),
        ({"type": "json_schema"}, "invalid_value", "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": []}, "invalid_value", "response_format.json_schema"),
        (
            {"type": "json_schema", "json_schema": {"name": "a"}},
            "invalid_value",
            "response_format.json_schema.schema",
        ),
        (wanted(schema=True), "invalid_value", "response_format.json_schema.schema"),
        (wanted(name="not a name"), "invalid_value", "response_format.json_schema.name"),
        (wanted(strict=1), "invalid_value", "response_format.json_schema.strict"),
        (wanted(description=1), "invalid_value", "response_format.json_schema.description"),
        (wanted(schemas=1), "unknown_parameter", "response_format.json_schema.schemas"),
        (wanted({"type": "strin"}), "invalid_value", "response_format.json_schema.schema"),
        (wanted({"not": {}}), "invalid_value", "response_format.json_schema.schema"),
        (wanted({"enum": ["x" * 300_000]}), "invalid_value", "response_format.json_schema.schema"),
    ],
)
def test_what_cannot_be_obeyed_is_refused_at_its_path(
    scripted: ServerThread, value: Any, code: str, param: str
) -> None:
    reply = scripted.chat(response_format=value)
    assert reply.status == 422
    assert (reply.error["code"], reply.error["param"]) == (code, param)
    assert len(reply.error["message"]) < 400


def test_all_problems_of_the_field_are_said_at_once(scripted: ServerThread) -> None:
    value = {"type": "json_schema", "json_schema": {"strict": 1, "frob": 2}}
    message = scripted.chat(response_format=value).error["message"]
    for name in ("frob", "name", "strict", "schema"):
        assert f"response_format.json_schema.{name}" in message


def test_unknown_fields_are_ignored_where_the_server_does_so(serve: Serve) -> None:
    server = serve(unknown_fields="ignore")
    assert server.chat(response_format={"type": "text", "frob": 1}).status == 200
    check(content(server.chat(response_format={**wanted(frob=1), "frob": 2})))


def test_the_end_comes_even_if_end_tokens_are_ignored(scripted: ServerThread) -> None:
    check(content(scripted.chat(response_format=wanted(), ignore_eos=True)))


BRANCHES = {f"b{place}": {"$ref": "#"} for place in range(300)}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "object", "properties": BRANCHES},
        {"anyOf": [{"type": "object", "properties": {"a": {"const": each}}} for each in range(5000)]},
        {"allOf": [{"type": "string", "pattern": f"^(a|b)*a(a|b){{{each}}}$"} for each in range(10, 30)]},
        {
            "type": "object",
            "properties": {f"p{each}": {"type": "string", "pattern": "^[a-z]+$"} for each in range(3000)},
        },
        {"type": "array", "items": {"type": "integer"}, "minItems": 10**9},
        {"type": "string", "pattern": "^((a{1,1000}){1,1000}){1,1000}$"},
    ],
)
@pytest.mark.timeout(30)
def test_a_schema_that_explodes_is_answered_all_the_same(scripted: ServerThread, schema: Any) -> None:
    reply = scripted.chat(response_format=wanted(schema), max_tokens=20, temperature=1, seed=1)
    assert reply.status in (200, 422)
    if reply.status == 422:
        assert reply.error["param"] == "response_format.json_schema.schema"
    check(content(scripted.chat(response_format=wanted())))


def test_many_schemas_at_once_beside_plain_requests(serve: Serve) -> None:
    server = serve(hooked_load(script="Hello."))

    def ask(place: int) -> str:
        if place % 2:
            return content(server.chat(temperature=0))
        return content(server.chat(response_format=wanted({"const": place}), temperature=place % 4))

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(16)))
    assert answers == ["Hello." if place % 2 else str(place) for place in range(16)]


def test_a_grammar_that_has_ended_ends_the_answer_whatever_the_least_number_of_tokens(
    scripted: ServerThread,
) -> None:
    asked = wanted({"const": {"a": 1}})
    fields: dict[str, Any] = {"min_tokens": 100, "max_tokens": 200, "frequency_penalty": 2}
    for temperature in (0, 1):
        reply = scripted.chat(response_format=asked, temperature=temperature, **fields)
        assert json.loads(content(reply)) == {"a": 1}


def test_a_completion_follows_a_schema_too(scripted: ServerThread) -> None:
    body = {"prompt": "x", "response_format": wanted(), "max_tokens": 200}
    reply = scripted.request("POST", "/v1/completions", body)
    assert reply.status == 200, reply.body
    check(reply.json["choices"][0]["text"])
