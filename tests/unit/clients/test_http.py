"""The client's reading of HTTP, without a socket."""

from collections.abc import Callable, Generator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logitwire.http import Body, BrokenAnswerError, Head, Incoming, request_bytes


def fed(
    reading: Generator[memoryview, int, Any], data: bytes, step: Callable[[], int] = lambda: 2**20
) -> Any:
    """Return what a reader returns for these bytes, which come ``step`` at a time."""
    received: int | None = None
    at = 0
    while True:
        try:
            view = reading.send(received)  # type: ignore[arg-type]
        except StopIteration as stop:
            return stop.value
        received = min(len(view), step(), len(data) - at)
        assert len(view)
        view[:received] = data[at : at + received]
        at += received


def whole(incoming: Incoming) -> Generator[memoryview, int, tuple[Head, bytes, bool]]:
    head = yield from incoming.head()
    body = Body(incoming, head)
    content = yield from body.read(2**20)
    return head, content, body.may_follow


def read(data: bytes, step: Callable[[], int] = lambda: 2**20) -> tuple[Head, bytes, bool]:
    return fed(whole(Incoming()), data, step)


def chunked(pieces: list[bytes]) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%X\r\n%b\r\n" % (len(each), each) for each in pieces) + b"0\r\n\r\n"


@given(pieces=st.lists(st.binary(min_size=1, max_size=30000), max_size=4), data=st.data())
def test_chunks_add_up_however_they_are_cut(pieces: list[bytes], data: st.DataObject) -> None:
    sizes = st.sampled_from([1, 2, 7, 100, 8192, 10**6])
    step = data.draw(st.lists(sizes, min_size=1, max_size=5))
    turns = iter(range(10**9))
    head, content, may_follow = read(chunked(pieces), lambda: step[next(turns) % len(step)])
    assert (head.status, content, may_follow) == (200, b"".join(pieces), True)


@pytest.mark.parametrize("size", [0, 1, 5, 8191, 8192, 8193, 20000])
def test_a_stated_length_is_read_and_no_more(size: int) -> None:
    data = b"HTTP/1.1 503 Busy\r\nContent-Length: %d\r\n\r\n" % size + bytes(size)
    assert read(data)[1:] == (bytes(size), True)
    # What comes behind belongs to no request, so the connection is of no more use.
    assert read(data + b"HTTP")[1:] == (bytes(size), False)


def test_a_stated_length_that_was_taken_or_passed_over_is_the_end() -> None:
    def reading() -> Generator[memoryview, int, tuple[bytes | None, bytes, bool]]:
        incoming = Incoming()
        body = Body(incoming, (yield from incoming.head()))
        body.skip(2)
        taken = body.take(3)
        # Nothing is left to wait for.
        return taken, (yield from body.read(1)), body.may_follow

    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabcde"
    assert fed(reading(), answer) == (b"cde", b"", True)


def test_without_a_length_the_end_of_the_connection_is_the_end() -> None:
    assert read(b"HTTP/1.0 200 OK\r\n\r\n" + b"x" * 9000)[1:] == (b"x" * 9000, False)


@pytest.mark.parametrize(
    ("line", "header", "may_follow"),
    [
        ("HTTP/1.1 200 OK", "Connection: close", False),
        ("HTTP/1.1 200 OK", "Connection: Keep-Alive", True),
        ("HTTP/1.0 200 OK", "Connection: Keep-Alive", True),
        ("HTTP/1.0 200 OK", "X: y", False),
        ("HTTP/1.1 204", "X: y", True),
    ],
)
def test_a_connection_is_kept_only_where_both_sides_mean_it(line: str, header: str, may_follow: bool) -> None:
    length = "" if "204" in line else "Content-Length: 0\r\n"
    assert read(f"{line}\r\n{header}\r\n{length}\r\n".encode())[2] is may_follow


def test_interim_answers_trailers_and_extensions_are_passed_over() -> None:
    data = (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\nLink: x\r\n\r\n"
        b"HTTP/1.1 200 OK\r\nContent-Type: Text/Plain; charset=x\r\ntransfer-encoding: Chunked\r\n\r\n"
        b"3;name=value\r\nabc\r\n000\r\nTrailer: x\r\n\r\n"
    )
    head, content, may_follow = read(data)
    assert (head.status, head.media_type, content, may_follow) == (200, "text/plain", b"abc", True)


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 600 x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1e3\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n-3\r\nabc\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabcd\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 2**17 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 2**15 + b"\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"0" * 10000,
    ],
)
def test_what_is_no_http_is_said_to_be_broken(data: bytes) -> None:
    with pytest.raises(BrokenAnswerError):
        read(data)


def test_no_cut_of_an_answer_reads_as_a_whole_one() -> None:
    for data in (chunked([b"abc", b"d" * 20]), b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n123456789"):
        for length in range(len(data)):
            with pytest.raises(BrokenAnswerError):
                read(data[:length])


def test_large_pieces_are_received_where_they_belong() -> None:
    incoming = Incoming()
    place = memoryview(bytearray(100_000))
    asked: list[memoryview] = []

    def reading() -> Generator[memoryview, int, int]:
        head = yield from incoming.head()
        return (yield from Body(incoming, head).fill(place))

    def noting() -> Generator[memoryview, int, int]:
        inner, received = reading(), None
        while True:
            try:
                view = inner.send(received)  # type: ignore[arg-type]
            except StopIteration as stop:
                return stop.value
            asked.append(view)
            received = yield view

    assert fed(noting(), chunked([bytes(100_000)])) == 100_000
    direct = [each for each in asked if each.obj is place.obj]
    assert sum(map(len, direct)) > 90_000


def test_a_header_cannot_smuggle_a_line() -> None:
    with pytest.raises(ValueError, match="line break"):
        request_bytes("/x", "host", {"authorization": "Bearer a\r\nx: y"}, b"")
