"""The log: one line per request, and never what a request said unless that is asked for."""

import contextlib
import http.client
import json
import logging
from typing import Any

import pytest
import torch

from service.keys import ApiKeys
from service.settings import Settings
from service.telemetry import MAX_LOGGED_CHARACTERS, JsonFormatter, TextFormatter
from tests.conftest import Serve
from tests.fakes import hooked_load
from tests.service.test_life import Gate, send_raw
from tests.serving import ServerThread, eventually

ARROW = "application/vnd.apache.arrow.stream"
SECRET = "the moon is made of secrets"
KEY = "sk-a-very-private-key"
WITH_KEY = {"authorization": f"Bearer {KEY}"}


def lines_of(caplog: pytest.LogCaptureFixture, request_id: str) -> list[dict[str, Any]]:
    lines = [json.loads(JsonFormatter().format(each)) for each in caplog.records]
    return [
        line for line in lines if line["logger"] == "service.request" and line["request_id"] == request_id
    ]


def line_of(caplog: pytest.LogCaptureFixture, request_id: str) -> dict[str, Any]:
    eventually(lambda: len(lines_of(caplog, request_id)) > 0)
    (line,) = lines_of(caplog, request_id)
    return line


@pytest.fixture(autouse=True)
def _all_levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)


def test_the_line_of_an_answer_says_how_it_went(
    scripted: ServerThread, caplog: pytest.LogCaptureFixture
) -> None:
    reply = scripted.chat(headers={"x-request-id": "r-42"}, max_tokens=3, n=2, return_logits=True)
    line = line_of(caplog, "r-42")
    expected = {
        "method": "POST",
        "route": "/v1/chat/completions",
        "path": "/v1/chat/completions",
        "status": 200,
        "model": "scripted",
        "outcome": "answered",
        "finish_reason": "length",
        "prompt_tokens": reply.json["usage"]["prompt_tokens"],
        "completion_tokens": 6,
        "cached_tokens": 0,
        "rows": 6,
        "row_bytes": 6 * 512 * 2,
        "bytes": len(reply.body),
    }
    assert expected.items() <= line.items()
    assert line["seconds"] >= line["ttft_s"] >= line["queue_s"] >= 0
    assert line["prefill_s"] >= 0
    assert line["decode_s"] >= 0
    assert 1 <= line["mean_batch_size"] <= line["max_batch_size"] <= 2
    assert "error_code" not in line
    text = next(
        TextFormatter().format(each) for each in caplog.records if getattr(each, "request_id", "") == "r-42"
    )
    assert "request_id=r-42" in text


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [({"max_tokens": -1}, 422, "invalid_value"), ({"model": "none"}, 404, "model_not_found")],
)
def test_the_line_of_a_refusal_has_its_code(
    scripted: ServerThread, caplog: pytest.LogCaptureFixture, fields: dict[str, Any], status: int, code: str
) -> None:
    scripted.chat(headers={"x-request-id": f"r-{code}"}, **fields)
    line = line_of(caplog, f"r-{code}")
    assert {"status": status, "error_code": code, "route": "/v1/chat/completions"}.items() <= line.items()


@pytest.mark.parametrize("fields", [{}, {"stream": True}])
def test_the_line_of_a_failure_has_its_code_whatever_the_status(
    serve: Serve, caplog: pytest.LogCaptureFixture, fields: dict[str, Any]
) -> None:
    def hook(place: int, row: torch.Tensor) -> None:
        if place == 2:
            row[0] = float("nan")

    serve(hooked_load(hook)).chat(headers={"x-request-id": "r-1"}, **fields)
    line = line_of(caplog, "r-1")
    assert {"outcome": "failed", "error_code": "non_finite_logits"}.items() <= line.items()
    assert line["status"] == (200 if fields else 500)


def test_the_line_of_a_client_that_left_says_so(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()
    server = serve(hooked_load(gate, max_model_len=10**9))
    connection = send_raw(server, ARROW, ignore_eos=True, return_logits=False, max_tokens=10**8)
    assert gate.reached.wait(20)
    connection.close()
    gate.opened.set()
    eventually(lambda: any(getattr(each, "outcome", "") == "client_left" for each in caplog.records))


def test_a_path_cannot_forge_a_line_of_the_log(
    scripted: ServerThread, caplog: pytest.LogCaptureFixture
) -> None:
    scripted.request("GET", "/v1/models/x%0A99:99:99%20ERROR%20forged%00", headers={"x-request-id": "r-f"})
    eventually(lambda: any(getattr(each, "request_id", "") == "r-f" for each in caplog.records))
    lines = [
        TextFormatter().format(each) for each in caplog.records if getattr(each, "request_id", "") == "r-f"
    ]
    assert len(lines) == 1
    assert lines[0].isprintable()


# What is never logged.


def failing_load(place_to_fail: int = 2) -> Any:
    def hook(place: int, row: torch.Tensor) -> None:
        if place == place_to_fail:
            raise ValueError(f"cannot work with {SECRET!r}")

    return hooked_load(hook, script=SECRET)


@pytest.fixture
def everything_logged(serve: Serve, caplog: pytest.LogCaptureFixture) -> list[str]:
    """All lines of servers that were sent the secret in every way that is answered, refused or fails."""
    message = {"role": "user", "content": SECRET}
    bodies: list[tuple[str, Any]] = [
        ("/v1/chat/completions", {"messages": [message]}),
        ("/v1/chat/completions", {"messages": [message], "stream": True}),
        ("/v1/chat/completions", {"messages": [message], "temperature": SECRET}),
        ("/v1/chat/completions", {"messages": [message], SECRET: 1}),
        ("/v1/chat/completions", {"messages": [message], "model": SECRET}),
        ("/v1/chat/completions", {"messages": [{"role": SECRET, "content": SECRET}]}),
        ("/v1/chat/completions", {"messages": [message], "stop": [SECRET] * 20}),
        ("/v1/chat/completions", {"messages": [message], "response_format": {"type": SECRET}}),
        (
            "/v1/chat/completions",
            {
                "messages": [message],
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": SECRET}},
                },
            },
        ),
        ("/v1/chat/completions", f'{{"messages": "{SECRET}'.encode()),
        ("/v1/completions", {"prompt": SECRET}),
        ("/v1/completions", {"prompt": [SECRET, 1]}),
        ("/v1/completions/render", {"prompt": SECRET}),
        ("/tokenize", {"prompt": SECRET}),
        ("/detokenize", {"tokens": SECRET}),
        ("/v1/logits", {"sequences": [{"text": SECRET}]}),
        ("/v1/divergence", {"p": {"text": SECRET}, "q": {"text": SECRET}, "completion": SECRET}),
        ("/inference/v1/generate", {"token_ids": list(SECRET.encode()), "output_mode": "text"}),
        ("/inference/v1/generate", {"token_ids": SECRET}),
    ]
    num_sent = 0
    for load in (hooked_load(script=SECRET), failing_load()):
        server = serve(load, api_keys=ApiKeys.of([KEY]), cors_origins="*")
        for path, body in bodies:
            for headers in (WITH_KEY, {**WITH_KEY, "accept": ARROW}, {"authorization": f"Bearer {KEY}x"}):
                # That is how a failed stream ends.
                with contextlib.suppress(http.client.IncompleteRead):
                    server.request("POST", path, body, headers)
                num_sent += 1
    eventually(lambda: sum(each.name == "service.request" for each in caplog.records) == num_sent)
    return [
        formatter.format(each) for each in caplog.records for formatter in (JsonFormatter(), TextFormatter())
    ]


def test_no_line_at_any_level_has_a_text_or_a_key(everything_logged: list[str]) -> None:
    assert len(everything_logged) > 200
    assert any("builtins.ValueError" in line for line in everything_logged)
    assert not [line for line in everything_logged if "secrets" in line or KEY in line]


def test_the_settings_are_logged_without_their_keys(caplog: pytest.LogCaptureFixture) -> None:
    shown = Settings(api_keys=ApiKeys.of([KEY]))
    assert KEY not in repr(shown)
    assert KEY not in str(shown.api_keys)


def raised(error: BaseException, cause: BaseException | None = None) -> logging.LogRecord:
    try:
        raise error from cause
    except BaseException as caught:
        exc_info = (type(caught), caught, caught.__traceback__)
    return logging.LogRecord("x", logging.ERROR, __file__, 1, "failed", (), exc_info)


def test_a_trace_says_what_torch_says_and_where_but_repeats_no_input() -> None:
    for formatter in (JsonFormatter(), TextFormatter()):
        text = formatter.format(raised(RuntimeError("tried to allocate 2 GiB"), KeyError(SECRET)))
        assert "builtins.RuntimeError: tried to allocate 2 GiB" in text
        assert "builtins.KeyError" in text
        assert SECRET not in text
        assert __file__ in text
    assert SECRET in JsonFormatter(shows_texts=True).format(raised(KeyError(SECRET)))


def test_texts_are_logged_if_that_is_asked_for(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    server = serve(hooked_load(script="the answer"), log_prompts=True)
    messages = [{"role": "user", "content": SECRET + "x" * 3000}]
    for place, fields in enumerate(({}, {"stream": True}, {"headers": {"accept": ARROW}})):
        headers = {"x-request-id": f"r-{place}", **fields.pop("headers", {})}
        assert server.chat(headers=headers, messages=messages, **fields).status == 200
        line = line_of(caplog, f"r-{place}")
        (prompt,) = line["prompts"]
        assert SECRET in prompt
        assert len(prompt) == MAX_LOGGED_CHARACTERS
        assert line["completions"] == ["the answer"]
