"""The runner of the cases does what their keys say, and takes no broken answer for a good one."""

import base64
import json
from dataclasses import dataclass
from typing import Any

import pytest

from tests.cases.expect import check_answer
from tests.cases.runner import Answer, Run, load_cases, read_case, run_case, strict_json
from tests.serving import ServerThread

BODY = {"model": "MODEL", "messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 3}
HEAD = {
    "id": "X-1",
    "area": "x",
    "expect": "x",
    "method": "POST",
    "path": "/v1/chat/completions",
    "headers": {"Content-Type": "application/json"},
}


@dataclass
class Scripted:
    url: str
    model: str = "scripted"
    pid: int = 0


def run(server: ServerThread, **keys: Any) -> Run:
    return run_case(read_case({**HEAD, **keys}), lambda _: Scripted(server.url))


def answer(status: int, body: Any, media_type: str = "application/json", seconds: float = 0.1) -> Answer:
    encoded = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": media_type}
    return Answer(status=status, headers=headers, body=encoded, headers_s=seconds, seconds=seconds)


def error(**fields: Any) -> dict[str, Any]:
    return {"error": {"message": "m", "type": "t", "param": "n", "code": "invalid_value", **fields}}


def test_raw_bytes_are_sent_as_they_are(scripted: ServerThread) -> None:
    body = json.dumps(BODY).encode()
    assert run(scripted, raw_b64=base64.b64encode(body).decode())[0].status == 200
    assert run(scripted, raw_b64=base64.b64encode(b"\xff").decode())[0].status == 400


def test_later_requests_copy_change_repeat_and_derive(scripted: ServerThread) -> None:
    then = [
        {"when": "before", "set": {"max_tokens": 1}},
        {"when": "concurrent", "copy_of": 1, "set": {"max_tokens": None}, "count": 3},
        {"when": "after", "set": {"messages": [{"role": "user", "content": "<<A>>"}]}},
    ]
    then[2]["derive"] = {"A": ["0.choices.0.message.content", "1.choices.0.message.content"]}
    found = run(scripted, body={**BODY, "return_token_ids": True}, then=then)
    assert [len(found.answers[number]) for number in range(4)] == [1, 1, 3, 1]
    used = [found[number].json["usage"]["completion_tokens"] for number in range(4)]
    assert used[0] == used[3] == 3
    assert used[1] == 1
    assert used[2] > 3
    assert b"HelH" in bytes(each for each in found[3].json["prompt_token_ids"] if each < 256)


def test_generated_values_stand_alone_or_inside_a_text() -> None:
    gen = {
        "template": {"text": "<<A>>!", "list": "<<B>>", "map": "<<C>>"},
        "A": {"repeat": "ab", "count": 2},
        "B": {"items": 7, "count": 2},
        "C": {"ids": "3..4", "value": -1},
    }
    (step,) = read_case({**HEAD, "gen": gen}).steps
    assert step.body == {"text": "abab!", "list": [7, 7], "map": {"3": -1, "4": -1}}
    nested = {"raw_template": '{"x":<<D>>}', "D": {"open": "[", "close": "]", "count": 2}}
    assert read_case({**HEAD, "gen": nested}).steps[0].raw == b'{"x":[[]]}'


def test_an_unknown_key_is_an_error() -> None:
    with pytest.raises(AssertionError):
        read_case({**HEAD, "surface": "logits"})


@pytest.mark.parametrize(
    ("given", "check"),
    [
        (answer(201, {}), {}),
        (answer(500, error()), {"status": 500}),
        (answer(422, {"detail": "x"}), {"status": 422}),
        (answer(422, error()), {"status": 422, "code": "unknown_parameter"}),
        (answer(422, error()), {"status": 422, "param": "max_tokens"}),
        (answer(422, error(param="nn")), {"status": 422, "param": "n"}),
        (answer(422, error()), {"status": 422, "says": ["70000"]}),
        (answer(422, error(message="")), {"status": 422}),
        (answer(200, {}, "text/plain"), {"type": "application/json"}),
        (answer(200, {}, seconds=3), {"within_s": 1}),
        (answer(200, {}), {"body": ""}),
        (answer(200, {"a": [{"b": 2}]}), {"paths": {"a.0.b": 1}}),
        (answer(200, {"a": 6}), {"paths": {"a": {"max": 5}}}),
        (answer(200, {"a": True}), {"paths": {"a": {"type": "int"}}}),
        (answer(200, {"a": "x"}), {"paths": {"a": {"in": ["stop"]}}}),
    ],
)
def test_a_wrong_answer_is_noticed(given: Answer, check: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        check_answer(given, check, "scripted")


@pytest.mark.parametrize(
    "body",
    [
        b'data: {"choices":[]}\n\n',
        b"data: [DONE]\n\ndata: [DONE]\n\n",
        b"data: [DONE]\n",
        b'data: {"a":NaN}\n\ndata: [DONE]\n\n',
        b'data: {"error":{}}\n\ndata: [DONE]\n\n',
        b"event: x\ndata: {}\n\ndata: [DONE]\n\n",
    ],
)
def test_a_broken_stream_is_noticed(body: bytes) -> None:
    with pytest.raises((AssertionError, ValueError)):
        _ = answer(200, body, "text/event-stream").events


def test_numbers_that_json_does_not_have_are_noticed() -> None:
    for text in ("[NaN]", "[-Infinity]"):
        with pytest.raises(AssertionError):
            strict_json(text)


def test_the_data_are_read_whole() -> None:
    assert all(case.steps for case in load_cases().values())
