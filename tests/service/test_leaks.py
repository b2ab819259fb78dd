"""What answers must not tell, whatever goes wrong: paths, secrets, and where in the code it happened."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Load
from service.settings import Settings
from tests.conftest import Serve
from tests.fakes import hooked_load
from tests.service.test_life import send_raw
from tests.service.test_limits import received
from tests.serving import ServerThread, eventually

ARROW = "application/vnd.apache.arrow.stream"
SECRET = "/home/ada/models/config.json: token hf_verysecret"
FORBIDDEN = re.compile(rb"/home|hf_|Traceback|File \"|\.py\b|site-packages|line \d")


def failing_load(_: EngineConfig) -> Any:
    raise OSError(SECRET)


def load_that_fails_in(method: str) -> Load:
    def fail(*arguments: Any, **named: Any) -> Any:
        raise OSError(SECRET)

    def load(config: EngineConfig) -> Any:
        model, info = hooked_load()(config)
        setattr(model.tokenizer, method, fail)
        return model, info

    return load


def answers_of(server: ServerThread) -> Iterator[bytes]:
    """Give out whole answers, heads included, of every form."""
    for accept in ("application/json", ARROW):
        for fields in ({}, {"stream": True}, {"return_logits": True, "logprobs": True}):
            with send_raw(server, accept, **fields) as connection:
                yield received(connection)
    for path in ("/ready", "/health", "/version", "/v1/models", "/tokenizer_info", "/nope"):
        reply = server.request("GET", path)
        yield str(reply.headers).encode() + reply.body
    for path, body in (
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [1]}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/completions/render", {"prompt": "x"}),
        ("/v1/logits", {"sequences": [{"text": "xyz"}]}),
        ("/v1/divergence", {"p": {"text": "x"}, "q": {"text": "y"}, "completion": "z"}),
        ("/inference/v1/generate", {"token_ids": [1], "output_mode": "text"}),
    ):
        reply = server.request("POST", path, body)
        yield str(reply.headers).encode() + reply.body


def raise_os_error(place: int, row: torch.Tensor) -> None:
    if place == 2:
        raise OSError(SECRET)


def kill(place: int, row: torch.Tensor) -> None:
    class Killed(BaseException):
        pass

    if place == 2:
        raise Killed(SECRET)


@pytest.mark.parametrize(
    "load",
    [
        hooked_load(raise_os_error),
        hooked_load(kill),
        load_that_fails_in("encode"),
        load_that_fails_in("render_chat"),
        load_that_fails_in("token_bytes"),
        load_that_fails_in("token_text"),
        load_that_fails_in("detokenizer"),
    ],
)
def test_no_failure_tells_what_only_the_log_should_know(serve: Serve, load: Load) -> None:
    server = serve(load)
    answers = list(answers_of(server))
    assert any(b"internal_error" in each for each in answers)
    assert not [each for each in answers if FORBIDDEN.search(each)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_model_that_cannot_be_loaded_is_no_ones_business() -> None:
    server = ServerThread(Settings(model_name=SECRET, port=0, drain_timeout=5.0), failing_load)
    server.start(wait_ready=False)
    try:
        eventually(lambda: server.engine.state == "dead")
        reply = server.request("GET", "/ready")
        assert (reply.status, reply.error["code"]) == (503, "internal_error")
        assert "could not be loaded" in reply.error["message"]
        assert server.chat().status == 500
        assert not [each for each in answers_of(server) if FORBIDDEN.search(each)]
    finally:
        server.stop()
