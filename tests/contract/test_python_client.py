"""The project's own client against a real server."""

import math
import threading
from typing import Any

import numpy as np
import pytest
import torch

from logitwire import APIError, Client, ConnectionFailedError, IncompleteStreamError, jsd
from logitwire import arrow as client_arrow
from schemas import arrow as wire_arrow
from tests.conftest import Serve
from tests.fakes import VOCAB_SIZE, hooked_load
from tests.serving import ServerThread

MESSAGES = [{"role": "user", "content": "Say hi."}]
SCRIPT = "Hello from the scripted model."


def test_client_and_server_state_the_same_wire() -> None:
    for name in ("MEDIA_TYPE", "RESPONSE_KEY", "END_KEY", "ERROR_KEY"):
        assert getattr(client_arrow, name) == getattr(wire_arrow, name)


@pytest.mark.parametrize("base", ["", "/", "/v1", "/v1/"])
def test_a_chat_returns_text_ids_logprobs_and_rows(scripted: ServerThread, base: str) -> None:
    result = Client(scripted.url + base).chat(MESSAGES, temperature=0)
    num = len(SCRIPT) + 1
    assert result.text == SCRIPT
    assert "".join(result.tokens) == SCRIPT + "<|im_end|>"
    assert len(result.token_ids) == num
    assert result.logits is not None
    assert result.logits.shape == (num, 512)
    assert result.logits.dtype == np.float16
    assert result.logits.argmax(-1).tolist() == result.token_ids
    assert (result.finish_reason, result.stop_reason) == ("stop", None)
    assert result.usage["completion_tokens"] == num
    assert result.metadata["wire_dtype"] == "float16"
    rows = result.logits.astype(np.float64)
    exact = rows - np.log(np.exp(rows).sum(-1, keepdims=True))
    np.testing.assert_allclose(result.logprobs, exact[np.arange(num), result.token_ids], atol=1e-2)
    assert (jsd(result.logits, result.logits) == 0).all()


@pytest.mark.parametrize("max_tokens", [None, 31, 3])
def test_rows_lie_in_the_memory_that_was_received_into(
    scripted: ServerThread, monkeypatch: pytest.MonkeyPatch, max_tokens: int | None
) -> None:
    received: list[memoryview] = []
    next_rows = client_arrow._Rows.next

    def spy(rows: Any, num: int) -> memoryview:
        received.append(next_rows(rows, num))
        return received[-1]

    monkeypatch.setattr(client_arrow._Rows, "next", spy)
    result = Client(scripted.url).chat(MESSAGES, temperature=0, max_tokens=max_tokens)
    assert result.logits is not None
    assert not result.logits.flags.writeable
    assert not result.logits.flags.owndata
    assert sum(map(len, received)) == result.logits.nbytes
    for buffer in received:
        assert np.shares_memory(np.frombuffer(buffer, np.uint8), result.logits)
    with pytest.raises(ValueError, match="read-only"):
        result.logits[0, 0] = 1


def test_float32_rows_and_no_rows(scripted: ServerThread) -> None:
    client = Client(scripted.url)
    wide = client.chat(MESSAGES, temperature=0, logits="float32", max_tokens=3)
    assert wide.logits is not None
    assert wide.logits.dtype == np.float32
    none = client.chat(MESSAGES, temperature=0, logits=None, max_tokens=3)
    assert none.logits is None
    assert none.token_ids == wide.token_ids
    np.testing.assert_array_equal(none.logprobs, wide.logprobs)


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_compressed_rows_are_the_same(scripted: ServerThread, compression: str) -> None:
    client = Client(scripted.url)
    plain = client.chat(MESSAGES, temperature=0)
    compressed = client.chat(MESSAGES, temperature=0, arrow_compression=compression)
    np.testing.assert_array_equal(plain.logits, compressed.logits)
    assert plain.tokens == compressed.tokens


def test_a_dtype_that_there_is_not_is_refused(scripted: ServerThread) -> None:
    with pytest.raises(ValueError, match="float64"):
        Client(scripted.url).chat(MESSAGES, logits="float64")


def test_statistics_and_columns_come_by_name(scripted: ServerThread) -> None:
    result = Client(scripted.url).chat(MESSAGES, temperature=0, token_stats=True, logit_token_ids=[5, 7])
    assert result.logits is None
    assert result.columns["rank"] == [1] * len(result.token_ids)
    assert {len(each) for each in result.columns["selected_logits"]} == {2}


def test_other_fields_are_passed_on(scripted: ServerThread) -> None:
    result = Client(scripted.url).chat(
        MESSAGES, temperature=0, stop="from", repetition_penalty=1.0, model="scripted"
    )
    assert (result.text, result.stop_reason) == ("Hello ", "from")
    assert len(result.token_ids) == len("Hello from")


def test_the_servers_refusal_is_raised_with_its_parts(scripted: ServerThread) -> None:
    with pytest.raises(APIError, match="did you mean return_logits") as caught:
        Client(scripted.url).chat(MESSAGES, return_logit=True)
    error = caught.value
    assert (error.status, error.code, error.param) == (422, "unknown_parameter", "return_logit")
    assert error.request_id


def test_no_server_is_said_to_be_none() -> None:
    with pytest.raises(ConnectionFailedError):
        Client("http://127.0.0.1:9").chat(MESSAGES)
    with pytest.raises(ValueError, match="not an http"):
        Client("127.0.0.1:8000")


def test_a_failure_in_mid_stream_is_raised_as_what_it_is(serve: Serve) -> None:
    def hook(place: int, row: torch.Tensor) -> None:
        if place == 3:
            row[0] = math.nan

    with pytest.raises(APIError) as caught:
        Client(serve(hooked_load(hook)).url).chat(MESSAGES, temperature=0)
    assert (caught.value.code, caught.value.status) == ("non_finite_logits", None)


def test_a_server_that_goes_away_leaves_no_short_result(serve: Serve) -> None:
    reached, opened = threading.Event(), threading.Event()

    def hook(place: int, row: torch.Tensor) -> None:
        if place == 2:
            reached.set()
            assert opened.wait(20)

    server = serve(hooked_load(hook))
    outcomes: list[Any] = []

    def call() -> None:
        try:
            outcomes.append(Client(server.url).chat(MESSAGES, temperature=0))
        except (APIError, IncompleteStreamError) as error:
            outcomes.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    assert reached.wait(20)

    async def cut() -> None:
        for connection in list(server.server.server_state.connections):
            connection.transport.abort()

    server.on_loop(cut())
    opened.set()
    thread.join()
    assert isinstance(outcomes[0], IncompleteStreamError)


def test_raw_rows_arrive_bit_for_bit(serve: Serve) -> None:
    rows: dict[int, np.ndarray] = {}

    def keep(place: int, row: torch.Tensor) -> None:
        rows[place] = row.numpy().copy()

    result = Client(serve(hooked_load(keep)).url).chat(
        MESSAGES, temperature=3.0, top_k=5, seed=9, logits="float32"
    )
    assert result.logits is not None
    assert result.logits.shape[1] == VOCAB_SIZE
    for place, row in enumerate(result.logits):
        assert row.tobytes() == rows[place].tobytes()
