"""Requests as bytes on a socket: too large, too slow, or none."""

import contextlib
import json
import re
import socket
import time
from typing import Any
from urllib.parse import urlsplit

import pytest

from service import limits
from tests.conftest import Serve
from tests.serving import ServerThread, eventually

LINE = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
BODY = json.dumps({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}).encode()


def connect(server: ServerThread) -> socket.socket:
    address = urlsplit(server.url)
    return socket.create_connection((address.hostname, address.port), timeout=20)


def send(connection: socket.socket, sent: bytes) -> None:
    # The server may have had enough already.
    with contextlib.suppress(OSError):
        connection.sendall(sent)


def send_for_ever(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"x" * 100_000)


def received(connection: socket.socket) -> bytes:
    answer = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(2**16):
            answer += part
    return answer


def ask(server: ServerThread, sent: bytes) -> tuple[int, dict[str, Any]]:
    """Send bytes as they are; return the status and the envelope."""
    with connect(server) as connection:
        send(connection, sent)
        head, _, body = received(connection).partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head
    assert b"x-request-id: " in head
    return int(head.split()[1]), json.loads(body)["error"]


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (LINE + b"a: " + b"x" * 100_000 + b"\r\n\r\n", 431),
        (LINE + b"a: " + b"x" * 3_000_000, 431),
        (LINE + b"x" * 3_000_000, 431),
        (LINE + b"a: b\r\n" * 300 + b"\r\n", 431),
        (LINE + b"a: b\r\n" * 300_000, 431),
        (b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", 414),
        (b"GET /" + b"x" * 3_000_000, 414),
        (b"GET /?" + b"x" * 20_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", 414),
    ],
)
def test_heads_that_are_too_large_are_refused_with_the_envelope(
    scripted: ServerThread, sent: bytes, status: int
) -> None:
    got, error = ask(scripted, sent)
    assert (got, error["code"], error["type"]) == (status, "request_too_large", "invalid_request_error")
    assert scripted.request("GET", "/health").status == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 50,
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n",
        b"CONNECT example.org:443 HTTP/1.1\r\nhost: x\r\n\r\n",
        LINE + b"content-length: x\r\n\r\n",
        LINE + b"content-length: -5\r\n\r\n",
        LINE + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        LINE + b"bad header: x\r\n\r\n",
    ],
)
def test_what_is_no_http_gets_the_envelope(scripted: ServerThread, sent: bytes) -> None:
    status, error = ask(scripted, sent)
    assert (status, error["code"]) == (400, "malformed_request")
    assert scripted.request("GET", "/health").status == 200


def test_the_log_has_the_id_of_a_refusal_below_the_app(
    scripted: ServerThread, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with connect(scripted) as connection:
        send(connection, b"nonsense\r\n\r\n")
        answer = received(connection)
    (named,) = re.findall(rb"x-request-id: (\w+)", answer)
    assert [each for each in caplog.records if getattr(each, "request_id", "") == named.decode()]


def test_a_chunked_body_over_the_limit_is_refused_before_it_ends(serve: Serve) -> None:
    server = serve(max_body_bytes=100_000)
    with connect(server) as connection:
        send(connection, LINE + b"transfer-encoding: chunked\r\n\r\n" + b"7530\r\n" + b"x" * 30_000 + b"\r\n")
        for _ in range(5):
            send(connection, b"7530\r\n" + b"x" * 30_000 + b"\r\n")
        # The body has no end, and the answer is there all the same.
        answer = b""
        while not answer.endswith(b"}}"):
            answer += connection.recv(2**16)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"request_too_large" in answer


def test_a_small_chunked_body_is_read(scripted: ServerThread) -> None:
    with connect(scripted) as connection:
        chunks = b"".join(b"1\r\n" + bytes([each]) + b"\r\n" for each in BODY)
        send(
            connection,
            LINE + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n",
        )
        assert received(connection).startswith(b"HTTP/1.1 200 ")


def test_trailers_without_end_are_cut(scripted: ServerThread) -> None:
    with connect(scripted) as connection:
        send(connection, LINE + b"transfer-encoding: chunked\r\n\r\n0\r\na: " + b"x" * 3_000_000)
        assert b"431" in received(connection)[:20]


def test_a_head_that_does_not_end_is_given_up(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HEAD_TIMEOUT_S", 0.3)
    server = serve()
    for first in (b"", LINE, b"\r\n"):
        with connect(server) as connection:
            send(connection, first)
            assert received(connection) == b""
    with connect(server) as connection:
        # Whoever sends a byte now and then is given up all the same.
        send(connection, LINE)
        connection.settimeout(0.02)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                connection.sendall(b"x")
                if connection.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except OSError:
                break
        else:
            pytest.fail("the connection was still open")


def test_a_body_that_does_not_come_is_given_up(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BODY_TIMEOUT_S", 0.3)
    server = serve()
    with connect(server) as connection:
        send(connection, LINE + b"content-length: 100\r\n\r\n{")
        assert received(connection) == b""
    eventually(lambda: not server.server.server_state.connections)


def test_a_slow_answer_is_no_slow_request(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HEAD_TIMEOUT_S", 0.2)
    monkeypatch.setattr(limits, "BODY_TIMEOUT_S", 0.2)
    server = serve(script="x" * 3000)
    began = time.perf_counter()
    while time.perf_counter() - began < 1:
        reply = server.chat(max_tokens=3000)
        assert reply.status == 200


def test_requests_one_behind_the_other_are_all_answered(scripted: ServerThread) -> None:
    get = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    post = LINE + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
    last = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    with connect(scripted) as connection:
        send(connection, get + post + get + last)
        assert received(connection).count(b"HTTP/1.1 200 ") == 4


def test_a_body_that_nobody_reads_is_dropped_and_the_next_request_is_found(scripted: ServerThread) -> None:
    with connect(scripted) as connection:
        refused = b"POST /nope HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n" + b"x" * 1_000_000
        send(connection, refused + b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        answer = received(connection)
    assert answer.startswith(b"HTTP/1.1 404 ")
    assert b"HTTP/1.1 200 " in answer


def test_a_body_without_end_is_not_read_for_long(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LINGER_S", 0.2)
    server = serve()
    with connect(server) as connection:
        send(connection, b"POST /nope HTTP/1.1\r\nhost: x\r\ncontent-length: 100000000000\r\n\r\n")
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            send_for_ever(connection)
    eventually(lambda: not server.server.server_state.connections)


@pytest.mark.parametrize(
    "first", [b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 3, LINE + b"content-length: 5\r\n\r\n{"]
)
def test_nonsense_behind_a_request_is_answered_once_and_disturbs_nobody(
    scripted: ServerThread, caplog: pytest.LogCaptureFixture, first: bytes
) -> None:
    with connect(scripted) as connection:
        send(connection, first + b"\x00" * 100)
        answer = received(connection)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1
    eventually(lambda: not scripted.server.server_state.connections)
    assert not [each for each in caplog.records if each.levelname in ("ERROR", "CRITICAL")]


def test_a_wish_for_another_protocol_is_passed_over(scripted: ServerThread) -> None:
    upgrade = b"connection: upgrade, close\r\nupgrade: websocket\r\nsec-websocket-key: x\r\n\r\n"
    with connect(scripted) as connection:
        send(connection, b"GET /health HTTP/1.1\r\nhost: x\r\n" + upgrade)
        assert received(connection).startswith(b"HTTP/1.1 200 ")
