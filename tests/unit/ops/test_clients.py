"""The soak's clients find what they are there to find: here the server lies."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
import pytest

from ops.bench.clients import Ask, ViolationError, ask
from schemas.arrow import END_KEY

ENVELOPE = {"error": {"message": "m", "type": "server_error", "param": None, "code": "internal_error"}}
ARROW = Ask("arrow", "/", {}, is_arrow=True)
EVENTS = Ask("events", "/", {"stream": True})
JSON = Ask("json", "/", {})


@contextmanager
def server_that_sends(answer: bytes) -> Iterator[str]:
    """Answer one request with some bytes, and close."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                # All of it: a connection that closes with unread bytes is reset, and its answer may be lost.
                head, _, body = connection.recv(65536).partition(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                while len(body) < length:
                    body += connection.recv(65536)
                connection.sendall(answer)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            thread.join()


def ok(body: bytes, *, is_cut: bool = False) -> bytes:
    chunk = b"%x\r\n%s\r\n" % (len(body), body)
    return (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunk + (b"" if is_cut else b"0\r\n\r\n")
    )


def table(*, rows: int, record: dict[str, list[int]] | None) -> bytes:
    schema = pa.schema([pa.field("choice", pa.int32())])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        for _ in range(rows):
            writer.write_batch(pa.record_batch([pa.array([0], pa.int32())], schema=schema))
        if record is not None:
            empty = pa.record_batch([pa.array([], pa.int32())], schema=schema)
            writer.write_batch(empty, custom_metadata={END_KEY: json.dumps(record).encode()})
    return bytes(sink.getvalue())


def outcome(asked: Ask, answer: bytes) -> str:
    with server_that_sends(answer) as url:
        return ask(url, asked, timeout_s=20)


CHUNK = b'data: {"choices": [{"index": 0, "finish_reason": null}]}\n\n'
END = b'data: {"choices": [{"index": 0, "finish_reason": "stop"}]}\n\n'


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        (ARROW, ok(table(rows=3, record=None))),
        (ARROW, ok(table(rows=2, record={"rows": [3]}))),
        (EVENTS, ok(CHUNK)),
        (EVENTS, ok(CHUNK + b"data: [DONE]\n\n")),
        (EVENTS, ok(b"")),
        (JSON, ok(b'{"choices": [{"finish_reason": null}]}')),
        (JSON, b"HTTP/1.1 500 x\r\n\r\n" + json.dumps(ENVELOPE).encode()),
        (JSON, b"HTTP/1.1 422 x\r\n\r\nno envelope"),
    ],
)
def test_an_answer_that_is_short_and_looks_whole_is_a_violation(asked: Ask, answer: bytes) -> None:
    with pytest.raises(ViolationError):
        outcome(asked, answer)


@pytest.mark.parametrize(
    ("asked", "answer", "expected"),
    [
        (ARROW, ok(table(rows=3, record={"rows": [3]})), "whole"),
        (ARROW, ok(table(rows=3, record=None)[:-8], is_cut=True), "cut"),
        (EVENTS, ok(CHUNK + END + b"data: [DONE]\n\n"), "whole"),
        (EVENTS, ok(CHUNK + b"data: " + json.dumps(ENVELOPE).encode() + b"\n\n"), "failed internal_error"),
        (EVENTS, ok(CHUNK, is_cut=True), "cut"),
        (JSON, b"", "cut"),
    ],
)
def test_whole_failed_and_cut_answers_are_told_apart(asked: Ask, answer: bytes, expected: str) -> None:
    assert outcome(asked, answer) == expected
