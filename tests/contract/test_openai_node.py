"""The OpenAI SDK for Node does with this server what it does with OpenAI; see `node/client.mjs`."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.replies import GREETING, MODEL, RESULT, TOOLS
from tests.serving import ServerThread

FOLDER = Path(__file__).parent / "node"
DEADLINE_S = 60

pytestmark = pytest.mark.skipif(
    shutil.which("node") is None or shutil.which("npm") is None, reason="needs node and npm on this machine"
)


@pytest.fixture(scope="module")
def found(replying: ServerThread) -> Any:
    """Return what the program printed."""
    assert (FOLDER / "node_modules").is_dir(), "run npm ci --prefix tests/contract/node, or ./ops/just setup"
    output = subprocess.run(
        ["node", FOLDER / "client.mjs", replying.url, MODEL, json.dumps(TOOLS), RESULT],
        stdout=subprocess.PIPE,
        check=True,
        timeout=DEADLINE_S,
    ).stdout
    return json.loads(output)


def test_models_are_listed_and_found(found: Any) -> None:
    assert found["models"] == [MODEL]
    assert found["model"]["id"] == MODEL
    assert found["model"]["vocab_size"] == 300


def test_a_stream_adds_up_to_the_whole_answer(found: Any) -> None:
    (choice,) = found["chat"]["choices"]
    assert choice["message"]["content"] == GREETING
    stream = found["stream"]
    assert stream["content"] == GREETING
    assert stream["entries"] == choice["logprobs"]["content"]
    assert stream["finish"] == [choice["finish_reason"]] == ["stop"]
    assert stream["usage"]["completion_tokens"] == found["chat"]["usage"]["completion_tokens"]
    for entry in stream["entries"]:
        assert entry["logprob"] == entry["top_logprobs"][0]["logprob"]


def test_the_helper_for_streams_puts_the_answer_together(found: Any) -> None:
    (whole,), (choice,) = found["chat"]["choices"], found["helper"]["choices"]
    assert choice["message"]["content"] == GREETING
    assert choice["logprobs"]["content"] == whole["logprobs"]["content"]


@pytest.mark.parametrize(
    ("tool_choice", "finish_reason"), [("auto", "tool_calls"), ("required", "tool_calls"), ("named", "stop")]
)
def test_tools_are_called(found: Any, tool_choice: str, finish_reason: str) -> None:
    choice = found["calls"][tool_choice]
    assert choice["finish_reason"] == finish_reason
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"}


def test_streamed_calls_keep_apart(found: Any) -> None:
    message = found["streamedCalls"]["message"]
    assert message["content"] == "Sure."
    assert [(call["type"], call["function"]["name"]) for call in message["tool_calls"]] == [
        ("function", "get_weather"),
        ("function", "get_time"),
    ]
    arguments = [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]]
    assert arguments == [{"city": "Oslo"}, {"zone": "CET"}]


def test_the_result_of_a_call_goes_back_to_the_model(found: Any) -> None:
    assert found["answer"]["message"]["content"] == "It is 18 degrees in Oslo."
    assert found["answer"]["finish_reason"] == "stop"
    # The SDK's own loop does the same.
    assert found["runner"] == "It is 18 degrees in Oslo."


def test_structured_output_follows_its_schema(found: Any) -> None:
    assert json.loads(found["structured"]) == {"name": "Fair", "days": [5, 6]}


def test_a_text_is_continued_behind_its_echo(found: Any) -> None:
    choice = found["completion"]
    assert choice["text"] == found["streamedText"] == "Hi" + GREETING
    assert choice["logprobs"]["tokens"][:7] == list("HiHello")
    assert choice["logprobs"]["token_logprobs"][0] is None


def test_what_can_never_succeed_raises_at_the_first_try(found: Any) -> None:
    kinds = [each["kind"] for each in found["errors"]]
    assert kinds == ["UnprocessableEntityError", "NotFoundError", *["UnprocessableEntityError"] * 2]
    assert [(each["code"], each["param"]) for each in found["errors"]] == [
        ("invalid_value", "temperature"),
        ("model_not_found", "model"),
        ("unknown_parameter", "frob"),
        ("invalid_value", "top_p"),
    ]
    assert {(each["type"], each["tries"]) for each in found["errors"]} == {("invalid_request_error", 1)}
