"""What both Python clients make of servers and networks that fail."""

import os
import socket
import ssl
import threading
from typing import Any

import pytest
import trustme

from logitwire import (
    APIConnectionError,
    APIError,
    APITimeoutError,
    IncompleteStreamError,
    LogitwireError,
    OverloadedError,
    ServerError,
)
from logitwire.calls import chat
from logitwire.config import load_config
from logitwire.exchange import Exchange
from logitwire.sockets import Idle
from ops.bench.client_server import recorded_answer as replayed_answer
from ops.bench.transport_server import ROW_BYTES
from tests.clients import MESSAGES, AsyncTalker, Reply, Talker, fake_server, recorded_answer, refusal
from tests.contract.conftest import Talk
from tests.serving import ServerThread, eventually

ARROW = "application/vnd.apache.arrow.stream"

BODY = b'{"messages": [{"role": "user", "content": "Say hi."}], "temperature": 0, "max_tokens": 2}'


@pytest.fixture(scope="module")
def wide() -> bytes:
    """An answer whose two rows have chunks of their own, as the benchmark replays it."""
    return replayed_answer(2)


@pytest.fixture(scope="module")
def answer(scripted: ServerThread) -> bytes:
    """An answer of two rows, byte for byte as the server sends it."""
    return recorded_answer(scripted, "/v1/chat/completions", BODY, ARROW)


# Cuts.


def replayed(data: bytes) -> Any:
    """Return what a client makes of a connection that brings just these bytes."""
    config = load_config("http://x", None, timeout_s=1, max_retries=0, context=None)
    answering = Exchange(chat(MESSAGES, "float16", {"max_tokens": 2}), config).answer()
    received: int | None = None
    at = 0
    while True:
        try:
            item = answering.send(received)
        except StopIteration as stop:
            return stop.value
        received = None
        if isinstance(item, memoryview):
            received = min(len(item), len(data) - at)
            item[:received] = data[at : at + received]
            at += received


def test_no_cut_of_an_answer_gives_a_result(answer: bytes) -> None:
    assert replayed(answer).text == "He"
    for length in range(len(answer)):
        with pytest.raises(IncompleteStreamError if length else APIConnectionError):
            replayed(answer[:length])


ROW = b"\r\n%x\r\n" % ROW_BYTES
"""Between the small columns of a row and itself."""


def cuts_of(answer: bytes) -> dict[str, int]:
    """Return lengths at which an answer ends in each of its parts."""
    body = answer.index(b"\r\n\r\n") + 4
    row = answer.index(ROW)
    second_row = answer.index(ROW, row + 1)
    end = answer.index(b"logitwire.end")
    return {
        "in the status line": 5,
        "in the head": body - 10,
        "behind the head": body,
        "in the size of the first chunk": body + 1,
        "in the schema": body + 200,
        "in the head of a row": row - 100,
        "in the size of a row's chunk": row + 4,
        "in a row": row + 500,
        "between two rows": row + len(ROW) + ROW_BYTES,
        "in the last row": second_row + 1000,
        "behind the last row": second_row + len(ROW) + ROW_BYTES,
        "in the end record": end + 40,
        "before the closing chunk": len(answer) - 5,
        "in the closing chunk": len(answer) - 2,
    }


PARTS = [
    "in the status line",
    "in the head",
    "behind the head",
    "in the size of the first chunk",
    "in the schema",
    "in the head of a row",
    "in the size of a row's chunk",
    "in a row",
    "between two rows",
    "in the last row",
    "behind the last row",
    "in the end record",
    "before the closing chunk",
    "in the closing chunk",
]


@pytest.mark.parametrize(
    ("part", "then"),
    [*((part, "close") for part in PARTS), ("in a row", "reset"), ("before the closing chunk", "reset")],
)
def test_an_answer_that_is_cut_is_raised_and_never_asked_for_again(
    talk: Talk, wide: bytes, part: str, then: Any
) -> None:
    cuts = cuts_of(wide)
    with fake_server([Reply(wide[: cuts[part]], then)] * 2) as server:
        talker = talk(server.url)
        with pytest.raises(IncompleteStreamError, match="broke off|stream"):
            talker.call("chat", MESSAGES, max_tokens=2)
        assert len(server.requests) == 1
        stream = talker.client.chat_rows(MESSAGES, max_tokens=2)
        rows, error = rows_and_error(talker, stream)
        assert isinstance(error, IncompleteStreamError)
        num = len(rows)
        assert num <= 2
        if then == "close":
            # What had come was given out, and then the iteration raised.
            assert num == sum(
                cuts[part] >= cuts[each] for each in ("between two rows", "behind the last row")
            )
    assert talker.pauses == []


def rows_and_error(talker: Talker, stream: Any) -> tuple[list[Any], Exception | None]:
    """Return the rows of a stream, and what it raised behind them."""
    found: list[Any] = []

    async def read() -> None:
        async for row in stream:
            found.append(row)

    try:
        if isinstance(talker, AsyncTalker):
            talker.runner.run(read())
        else:
            found.extend(stream)
    except LogitwireError as error:
        with pytest.raises(RuntimeError, match="all rows were read"):
            _ = stream.result
        return found, error
    return found, None


def test_another_count_of_rows_is_raised(talk: Talk, answer: bytes) -> None:
    assert answer.count(b'"rows":[2]') == 1
    with fake_server([answer.replace(b'"rows":[2]', b'"rows":[3]')] * 2) as server:
        talker = talk(server.url)
        with pytest.raises(IncompleteStreamError, match=r"\[2\] rows came.*says \[3\]"):
            talker.call("chat", MESSAGES)
        stream = talker.client.chat_rows(MESSAGES, max_tokens=2)
        rows, error = rows_and_error(talker, stream)
    assert len(rows) == 2
    assert isinstance(error, IncompleteStreamError)


def test_an_answer_of_another_type_is_raised(talk: Talk) -> None:
    html = b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 3\r\n\r\nhi!"
    broken = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 3\r\n\r\n{hi"
    with fake_server([html, broken, b"SSH-2.0-x\r\n\r\n"]) as server:
        talker = talk(server.url)
        with pytest.raises(IncompleteStreamError, match="text/html"):
            talker.call("chat", MESSAGES)
        with pytest.raises(IncompleteStreamError, match="no JSON"):
            talker.call("divergence", "a", "b", "c")
        with pytest.raises(IncompleteStreamError, match="no HTTP"):
            talker.call("chat", MESSAGES)


def check_wide(talker: Talker) -> None:
    """Hold rows against what the benchmark's answer holds: row t is t everywhere."""
    whole = talker.call("chat", MESSAGES).logits
    rows, _ = talker.rows("chat", MESSAGES)
    for place in range(2):
        assert (whole[place] == place).all()
        assert (rows[place].logits == place).all()


def test_rows_that_are_wider_than_any_buffer_arrive_as_they_were_sent(talk: Talk, wide: bytes) -> None:
    with fake_server([wide, wide]) as server:
        check_wide(talk(server.url))
        assert server.num_connections == 1


# Time.


def test_a_server_that_says_nothing_is_given_up_and_asked_again(talk: Talk, answer: bytes) -> None:
    with fake_server([Reply(b"", "hang"), answer]) as server:
        talker = talk(server.url, timeout_s=0.2)
        assert talker.call("chat", MESSAGES).text == "He"
        assert len(talker.pauses) == 1
    with fake_server([Reply(b"", "hang")]) as server, pytest.raises(APITimeoutError):
        talk(server.url, timeout_s=0.2, max_retries=0).call("chat", MESSAGES)


def test_a_server_that_falls_silent_within_its_answer_is_given_up(talk: Talk, answer: bytes) -> None:
    for length in (1, len(answer) - 1000):
        with fake_server([Reply(answer[:length], "hang")]) as server:
            talker = talk(server.url, timeout_s=0.2)
            with pytest.raises(IncompleteStreamError, match="broke off"):
                talker.call("chat", MESSAGES)


# Retries.


@pytest.mark.parametrize("name", ["chat", "divergence"])
def test_a_busy_server_is_asked_again_after_its_own_pause(talk: Talk, answer: bytes, name: str) -> None:
    with fake_server(
        [refusal(503, "queue_full", "Retry-After: 7"), refusal(429, "x", "Retry-After-Ms: 1500"), answer]
    ) as server:
        talker = talk(server.url)
        if name == "chat":
            assert talker.call("chat", MESSAGES).text == "He"
        else:
            with pytest.raises(IncompleteStreamError, match="not application/json"):
                talker.call("divergence", "a", "b", "c")
        assert talker.pauses == [7, 1.5]
        assert len(server.requests) == 3
        assert len(set(server.requests)) == 1
        # The refusals were read to their end, so the connection was good for more.
        assert server.num_connections == 1


def test_tries_end_and_the_last_error_is_raised(talk: Talk) -> None:
    with fake_server([refusal(503, "queue_full")] * 5) as server:
        talker = talk(server.url, max_retries=1)
        with pytest.raises(OverloadedError) as caught:
            talker.call("chat", MESSAGES)
        assert len(server.requests) == 2
    assert (caught.value.status, caught.value.code, str(caught.value)) == (503, "queue_full", "no")
    assert 0.3 < talker.pauses[0] <= 0.5


@pytest.mark.parametrize(
    ("reply", "num_tries"),
    [
        (refusal(500, "non_finite_logits", "x-should-retry: false"), 1),
        (refusal(507, "out_of_memory", "x-should-retry: false"), 1),
        (refusal(507, "out_of_memory"), 1),
        (refusal(422, "invalid_value"), 1),
        (refusal(400, "x", "x-should-retry: true"), 3),
        (refusal(500, "internal_error"), 3),
        (refusal(408, "x"), 3),
        (refusal(409, "x"), 3),
        (b"HTTP/1.1 302 Found\r\nlocation: /\r\ncontent-length: 0\r\n\r\n", 1),
    ],
)
def test_the_server_says_what_is_worth_another_try(talk: Talk, reply: bytes, num_tries: int) -> None:
    with fake_server([reply] * 2 * num_tries) as server:
        talker = talk(server.url)
        with pytest.raises(APIError):
            talker.call("chat", MESSAGES)
        assert len(server.requests) == num_tries
        with pytest.raises(APIError):
            talker.rows("chat", MESSAGES)


def test_a_refusal_that_breaks_off_is_still_one(talk: Talk) -> None:
    with fake_server([Reply(refusal(500, "internal_error")[:-5], "close")]) as server:
        talker = talk(server.url, max_retries=0)
        with pytest.raises(ServerError) as caught:
            talker.call("chat", MESSAGES)
    assert caught.value.status == 500


def test_no_server_is_tried_again_and_then_said_to_be_none(talk: Talk) -> None:
    talker = talk("http://127.0.0.1:9")
    with pytest.raises(APIConnectionError, match="no connection to 127.0.0.1:9"):
        talker.call("chat", MESSAGES)
    assert len(talker.pauses) == 2


def test_a_connection_that_ends_without_an_answer_is_tried_again(talk: Talk, answer: bytes) -> None:
    with fake_server([Reply(b"", "reset"), Reply(b"", "close"), answer]) as server:
        talker = talk(server.url)
        assert talker.call("chat", MESSAGES).text == "He"
        assert len(talker.pauses) == 2
        assert server.num_connections == 3


# Kept connections.


def test_calls_share_a_connection(talk: Talk, answer: bytes) -> None:
    with fake_server([answer] * 4) as server:
        talker = talk(server.url)
        for _ in range(2):
            assert talker.call("chat", MESSAGES).text == "He"
            assert len(talker.rows("chat", MESSAGES)[0]) == 2
        assert server.num_connections == 1


def test_a_kept_connection_that_the_server_closed_is_replaced_without_a_pause(
    talk: Talk, answer: bytes
) -> None:
    with fake_server([Reply(answer, "close")] * 3) as server:
        talker = talk(server.url, max_retries=0)
        for _ in range(3):
            assert talker.call("chat", MESSAGES).text == "He"
        assert (server.num_connections, talker.pauses) == (3, [])


def test_a_kept_connection_that_ends_under_the_next_request_is_replaced_without_a_pause(
    talk: Talk, answer: bytes
) -> None:
    with fake_server([answer, Reply(b"", "close"), answer]) as server:
        talker = talk(server.url, max_retries=0)
        for _ in range(2):
            assert talker.call("chat", MESSAGES).text == "He"
        assert (server.num_connections, len(server.requests), talker.pauses) == (2, 3, [])


def test_a_kept_connection_that_breaks_within_its_answer_is_not_asked_again(
    talk: Talk, answer: bytes
) -> None:
    with fake_server([answer, Reply(answer[:7], "close"), answer]) as server:
        talker = talk(server.url)
        talker.call("chat", MESSAGES)
        with pytest.raises(IncompleteStreamError):
            talker.call("chat", MESSAGES)
        assert len(server.requests) == 2


@pytest.mark.parametrize(
    "change", [(b"HTTP/1.1", b"HTTP/1.0"), (b"content-type", b"connection: close\r\ncontent-type"), None]
)
def test_a_connection_is_not_kept_where_more_may_come_or_the_server_says_so(
    talk: Talk, answer: bytes, change: tuple[bytes, bytes] | None
) -> None:
    changed = answer.replace(*change, 1) if change is not None else answer + b"HTTP/1.1 200 OK\r\n"
    with fake_server([changed, answer]) as server:
        talker = talk(server.url)
        for _ in range(2):
            assert talker.call("chat", MESSAGES).text == "He"
        assert server.num_connections == 2


def test_a_fork_closes_its_own_ends_of_kept_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    idle, (mine, theirs) = Idle(), socket.socketpair()
    idle.put(mine)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert idle.take() is None
    assert mine.fileno() == -1
    theirs.close()


def test_a_closed_client_has_closed_its_connections(talk: Talk, answer: bytes) -> None:
    with fake_server([answer] * 2) as server:
        talker = talk(server.url)
        talker.call("chat", MESSAGES)
        threads = threading.active_count()
        if isinstance(talker, AsyncTalker):
            talker.runner.run(talker.client.close())
        else:
            talker.client.close()
        eventually(lambda: threading.active_count() < threads)


# Streams that are over.


def test_a_stream_that_is_over_ends_again_and_a_closed_or_failed_one_never_looks_like_it(
    talk: Talk, answer: bytes
) -> None:
    with fake_server([answer, answer, Reply(answer[:-1], "close")]) as server:
        talker = talk(server.url)
        _, whole = talker.rows("chat", MESSAGES)
        assert rows_and_error(talker, whole) == ([], None)
        _, left = talker.rows("chat", MESSAGES, until=1)
        failed = talker.client.chat_rows(MESSAGES)
        assert isinstance(rows_and_error(talker, failed)[1], IncompleteStreamError)
        for stream in (left, failed):
            with pytest.raises(RuntimeError, match="failed or was closed"):
                rows_and_error(talker, stream)


# The request, and TLS.


def test_a_request_names_the_host_the_key_and_what_it_takes(
    talk: Talk, answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGITWIRE_API_KEY", "from-the-environment")
    with fake_server([answer] * 2) as server:
        talk(server.url + "/some/prefix/v1", api_key="secret").call("chat", MESSAGES)
        talk(server.url).call("chat", MESSAGES)
    head, _, body = server.requests[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /some/prefix/v1/chat/completions HTTP/1.1\r\n")
    for line in (
        f"host: {server.url.removeprefix('http://')}",
        "authorization: Bearer secret",
        f"accept: {ARROW}",
        "accept-encoding: identity",
        "content-type: application/json",
    ):
        assert line.encode() in head.split(b"\r\n")
    assert body.startswith(b'{"messages":[{')
    assert b"authorization: Bearer from-the-environment\r\n" in server.requests[1]


def test_tls_is_spoken_and_the_server_must_be_the_one_it_says(talk: Talk, answer: bytes, wide: bytes) -> None:
    authority = trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    with fake_server([answer, wide, wide], context) as server:
        talker = talk(server.url, ssl_context=trusting)
        assert talker.call("chat", MESSAGES).logits.shape == (2, 512)
        check_wide(talker)
        with pytest.raises(APIConnectionError, match="certificate"):
            talk(server.url, max_retries=0).call("chat", MESSAGES)
