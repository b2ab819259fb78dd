"""The project's own client against a real server."""

import math
import pickle
import threading
from typing import Any

import numpy as np
import pytest
import torch

from logitwire import APIConnectionError, APIError, Client, IncompleteStreamError, jsd
from logitwire import arrow as client_arrow
from logitwire import rows as client_rows
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


def test_results_are_shown_and_pickled_without_more_than_their_rows(scripted: ServerThread) -> None:
    client = Client(scripted.url)
    answer = client.chat(MESSAGES, max_tokens=20, logits="float32")
    assert answer.logits is not None
    content = pickle.dumps(answer)
    assert len(content) < 1.5 * answer.logits.nbytes
    again = pickle.loads(content)
    np.testing.assert_array_equal(again.logits, answer.logits)
    assert again.to_arrow() == answer.to_arrow()
    apart = client.divergence("a", "b", "and so on" * 20)
    assert max(map(len, map(repr, (answer, apart)))) < 200


@pytest.mark.parametrize("max_tokens", [None, 31, 3])
def test_rows_lie_in_the_memory_that_was_received_into(
    scripted: ServerThread, monkeypatch: pytest.MonkeyPatch, max_tokens: int | None
) -> None:
    received: list[np.ndarray] = []
    next_rows = client_rows._Growing.next

    def spy(rows: Any, num: int) -> np.ndarray:
        received.append(next_rows(rows, num))
        return received[-1]

    monkeypatch.setattr(client_rows._Growing, "next", spy)
    result = Client(scripted.url).chat(MESSAGES, temperature=0, max_tokens=max_tokens)
    assert result.logits is not None
    assert not result.logits.flags.writeable
    assert not result.logits.flags.owndata
    assert sum(each.nbytes for each in received) == result.logits.nbytes
    for buffer in received:
        assert np.shares_memory(buffer, result.logits)
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
    with pytest.raises(APIConnectionError):
        Client("http://127.0.0.1:9", max_retries=0).chat(MESSAGES)
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


def test_given_tokens_come_as_one_result_per_sequence(scripted: ServerThread) -> None:
    first, second, third = Client(scripted.url).score(
        [
            {"token_ids": [*b"Hello there"]},
            {"text": "Grüße"},
            {"messages": MESSAGES, "completion": "Hi!"},
        ],
        logits="float32",
        token_stats=True,
        top_logprobs=2,
    )
    assert (first.token_ids, first.positions) == ([*b"Hello there"], list(range(1, 11)))
    assert second.token_ids == [*"Grüße".encode()]
    assert [third.token_ids[each] for each in third.positions] == [*b"Hi!"]
    assert third.tokens == ["H", "i", "!"]
    for result in (first, second, third):
        num = len(result.positions)
        assert result.segments == ["content"] * num
        assert result.logprobs.dtype == np.float32
        assert result.logits is not None
        assert result.logits.shape == (num, 512)
        assert result.logits.dtype == np.float32
        assert not result.logits.flags.writeable
        rows = result.logits.astype(np.float64)
        exact = rows - np.log(np.exp(rows).sum(-1, keepdims=True))
        ids = [result.token_ids[each] for each in result.positions]
        assert result.columns["token_id"] == ids
        np.testing.assert_allclose(result.logprobs, exact[np.arange(num), ids], atol=1e-4)
        assert [each[0] for each in result.columns["top_token_ids"]] == rows.argmax(-1).tolist()
        np.testing.assert_allclose(result.columns["top_logprobs"], np.sort(exact)[:, :-3:-1], atol=1e-4)
        np.testing.assert_allclose(result.columns["entropy"], -(np.exp(exact) * exact).sum(-1), atol=1e-4)
        assert result.metadata["wire_dtype"] == "float32"
        assert result.response["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("compression", [None, "lz4"])
def test_rows_of_each_sequence_lie_in_the_memory_that_was_received_into(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, compression: str | None
) -> None:
    received: list[np.ndarray] = []
    next_rows = client_rows._Growing.next

    def spy(rows: Any, num: int) -> np.ndarray:
        received.append(next_rows(rows, num))
        return received[-1]

    monkeypatch.setattr(client_rows._Growing, "next", spy)
    # Chunks of four tokens: rows of one sequence may come in several batches.
    client = Client(serve(hooked_load(), prefill_chunk=4).url)
    sequences = [{"token_ids": [*b"abcdefghijklmn"[place:]]} for place in range(3)]
    results = client.score(sequences, arrow_compression=compression)
    for result, sequence in zip(results, sequences, strict=True):
        assert result.token_ids == sequence["token_ids"]
        assert result.logits is not None
        assert not result.logits.flags.owndata
        own = [each for each in received if np.shares_memory(each, result.logits)]
        assert sum(each.nbytes for each in own) == result.logits.nbytes
        (alone,) = client.score([sequence])
        np.testing.assert_array_equal(result.logits, alone.logits)
        np.testing.assert_array_equal(result.logprobs, alone.logprobs)


def test_contexts_next_tokens_and_columns_of_given_tokens(scripted: ServerThread) -> None:
    client = Client(scripted.url)
    ids = [*b"abcdef"]
    (result,) = client.score([{"token_ids": ids, "prompt_length": 4}], next_token=True)
    assert (result.positions, result.columns["token_id"]) == ([4, 5, 6], [*b"ef", -1])
    assert result.logprobs[-1] == 0
    (result,) = client.score([{"token_ids": ids, "prompt_length": 4}], range="all", logits=None)
    assert result.logits is None
    assert result.segments == ["prompt"] * 3 + ["content"] * 2
    ragged = [[[1], [], [2, 3], [], [4]]]
    (result,) = client.score([{"token_ids": ids}], logit_token_ids=ragged)
    assert result.logits is None
    assert [len(each) for each in result.columns["selected_logits"]] == [1, 0, 2, 0, 1]


def test_a_single_token_has_no_row(scripted: ServerThread) -> None:
    none, some = Client(scripted.url).score([{"token_ids": [65]}, {"token_ids": [65, 66]}])
    assert (none.token_ids, none.positions, none.logprobs.shape) == ([65], [], (0,))
    assert none.logits is not None
    assert none.logits.shape == (0, 512)
    assert some.positions == [1]


def test_given_tokens_that_are_refused_say_which(scripted: ServerThread) -> None:
    client = Client(scripted.url)
    with pytest.raises(APIError) as caught:
        client.score([{"token_ids": [1, 2]}, {"token_ids": [1, 9999]}])
    assert (caught.value.status, caught.value.param) == (422, "sequences[1].token_ids[1]")
    with pytest.raises(APIError) as caught:
        client.score([])
    assert caught.value.param == "sequences"
    with pytest.raises(APIError, match="prompt_length"):
        client.score([{"token_ids": [1, 2], "prompt_length": "2"}])
    with pytest.raises(ValueError, match="float64"):
        client.score([{"text": "a"}], logits="float64")  # type: ignore[arg-type]
