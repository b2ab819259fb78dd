"""HTTP/1.1 without a socket: what to send, and how to read an answer into memory that exists.

Reading is written as generators that know no I/O (RFC 9112). Such a generator yields a buffer, is sent the
number of bytes that were received into it, 0 at the end of the connection, and yields the next one. So
threads and event loops share it, and a row goes from the socket to its place in one copy. One call can
receive more than the buffer holds, if the rest goes to :attr:`Incoming.view`: the number sent is then larger.
"""

import http.client
import io
import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

T = TypeVar("T")

Receiving = Generator[memoryview, int, T]
"""Yields buffers, is sent how much of each was filled, and returns its result."""

BUFFER_BYTES = 8192
"""Smaller pieces are received into a buffer of this size; larger ones go to their place at once."""

MAX_HEAD_BYTES = 2**16
MAX_CHUNK_LINE_BYTES = 4096

# The end of a chunk, and the size of the next one unless it is the last.
_USUAL_CHUNK = re.compile(rb"\r\n([1-9A-Fa-f][0-9A-Fa-f]{0,14})\r\n")

_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9]{2})(?: [^\r\n]*)?\r?\n")


class BrokenAnswerError(Exception):
    """The answer ended too early, or is no HTTP."""


class Source(Protocol):
    """Where a body comes from."""

    def take(self, size: int) -> bytes | None:
        """Return the next bytes if all of them are here already."""

    def here(self) -> tuple[memoryview, int, int]:
        """Return a buffer and between which places it holds the next bytes, as far as they are here."""

    def skip(self, size: int) -> None:
        """Pass over bytes that are here."""

    def fill(self, view: memoryview) -> Receiving[int]:
        """Fill a buffer; return how much came, which is less only at the end of the body."""


@dataclass(frozen=True, slots=True)
class Head:
    """Status and headers of an answer; names are in lower case."""

    status: int
    headers: Mapping[str, str]
    is_http_1_1: bool

    @property
    def media_type(self) -> str:
        """Return the content type without its parameters."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    @property
    def keeps_alive(self) -> bool:
        """Tell whether the connection may serve another request."""
        words = self.headers.get("connection", "").lower()
        return "close" not in words if self.is_http_1_1 else "keep-alive" in words


class Incoming:
    """The bytes that a connection brings.

    Attributes:
        buffer: Holds the bytes from ``start`` to ``stop``, which came and were not read yet.
        has_begun: Whether any byte of the current answer came.
    """

    def __init__(self) -> None:
        self.buffer = bytearray(BUFFER_BYTES)
        self.view = memoryview(self.buffer)
        self.start = self.stop = 0
        self.has_begun = False

    @property
    def is_empty(self) -> bool:
        """Tell whether all bytes that came were read."""
        return self.start == self.stop

    def take(self, size: int) -> bytes:
        """Return so many bytes; they must be here."""
        start = self.start
        self.start += size
        return bytes(self.view[start : self.start])

    def some(self, view: memoryview) -> Receiving[int]:
        """Receive some bytes into a buffer that is not empty; 0 at the end of the connection."""
        if self.start == self.stop:
            if len(view) >= BUFFER_BYTES:
                got = yield view
                # What came behind it is in the buffer.
                self.start, self.stop = 0, max(0, got - len(view))
                return min(got, len(view))
            yield from self.refill()
        got = min(len(view), self.stop - self.start)
        view[:got] = self.view[self.start : self.start + got]
        self.start += got
        return got

    def refill(self) -> Receiving[int]:
        """Receive some bytes into the buffer, which must be empty; 0 at the end of the connection."""
        self.start, self.stop = 0, (yield self.view)
        self.has_begun |= self.stop > 0
        return self.stop

    def line(self, limit: int) -> Receiving[bytes]:
        """Receive up to a line feed, which is part of the result.

        Raises:
            BrokenAnswerError: The connection ended before it, or the line is longer than ``limit`` bytes.
        """
        line = b""
        while True:
            end = self.buffer.find(b"\n", self.start, self.stop) + 1
            line += self.take((end or self.stop) - self.start)
            if len(line) > limit:
                raise BrokenAnswerError("the answer has a line that is too long")
            if end:
                return line
            if not (yield from self.refill()):
                raise BrokenAnswerError("the server closed the connection")

    def head(self) -> Receiving[Head]:
        """Receive the head of an answer; interim ones (1xx) are passed over.

        Raises:
            BrokenAnswerError: It is no head of HTTP/1.
        """
        while True:
            first = yield from self.line(MAX_HEAD_BYTES)
            match = _STATUS_LINE.fullmatch(first)
            if match is None:
                raise BrokenAnswerError("the answer is no HTTP/1")
            block = b""
            while (line := (yield from self.line(MAX_HEAD_BYTES))) not in (b"\r\n", b"\n"):
                block += line
                if len(block) > MAX_HEAD_BYTES:
                    raise BrokenAnswerError("the head of the answer is too long")
            status = int(match[2])
            if status >= 200:
                try:
                    fields = http.client.parse_headers(io.BytesIO(block + b"\r\n"))
                except http.client.HTTPException as error:
                    raise BrokenAnswerError("the head of the answer cannot be read") from error
                headers = {name.lower(): value for name, value in reversed(fields.items())}
                return Head(status, headers, match[1] == b"1")


class Body:
    """The body of an answer: in chunks, of a stated length, or up to the end of the connection."""

    def __init__(self, incoming: Incoming, head: Head) -> None:
        """Prepare.

        Raises:
            BrokenAnswerError: The length is none.
        """
        self._incoming = incoming
        self._is_chunked = head.headers.get("transfer-encoding", "").lower() == "chunked"
        length = head.headers.get("content-length")
        if head.status in (204, 304):
            length = "0"
        if not self._is_chunked and length is not None and not re.fullmatch("[0-9]+", length):
            raise BrokenAnswerError("the length of the answer is no number")
        self._is_bounded = self._is_chunked or length is not None
        self._left = 0 if self._is_chunked or length is None else int(length)
        self._has_chunk = False
        self._keeps_alive = self._is_bounded and head.keeps_alive
        self._is_over = self._is_bounded and not self._is_chunked and not self._left

    @property
    def may_follow(self) -> bool:
        """Tell whether all of the body was read, and another answer may follow it."""
        return self._is_over and self._keeps_alive and self._incoming.is_empty

    def take(self, size: int) -> bytes | None:
        """Return the next bytes if all of them are here already."""
        incoming = self._incoming
        if not self._left and self._is_chunked and not self._begin_chunk_here():
            return None
        if size > incoming.stop - incoming.start or (self._is_bounded and size > self._left):
            return None
        self._pass(size)
        return incoming.take(size)

    def here(self) -> tuple[memoryview, int, int]:
        """Return a buffer and between which places it holds the next bytes, as far as they are here."""
        incoming = self._incoming
        if not self._left and self._is_chunked and not self._begin_chunk_here():
            return incoming.view, 0, 0
        stop = min(incoming.stop, incoming.start + self._left) if self._is_bounded else incoming.stop
        return incoming.view, incoming.start, stop

    def skip(self, size: int) -> None:
        """Pass over bytes that are here."""
        self._pass(size)
        self._incoming.start += size

    def _pass(self, size: int) -> None:
        self._left -= size
        if not self._left and self._is_bounded and not self._is_chunked:
            self._is_over = True

    def fill(self, view: memoryview) -> Receiving[int]:
        """Fill a buffer; return how much came, which is less only at the end of the body.

        Raises:
            BrokenAnswerError: The connection ended before the body did.
        """
        incoming = self._incoming
        at, size = 0, len(view)
        while at < size and not self._is_over:
            if self._is_chunked and not self._left:
                if not self._begin_chunk_here():
                    yield from self._begin_chunk()
                continue
            wanted = min(size - at, self._left) if self._is_bounded else size - at
            got = yield from incoming.some(view[at : at + wanted])
            at += got
            self._pass(got)
            if not got:
                if self._is_bounded:
                    raise BrokenAnswerError("the server closed the connection")
                self._is_over = True
        return at

    def read(self, limit: int) -> Receiving[bytes]:
        """Receive all that is left, up to ``limit`` bytes.

        Raises:
            BrokenAnswerError: The connection ended before the body did, or there is more.
        """
        whole = bytearray()
        piece = memoryview(bytearray(BUFFER_BYTES))
        while got := (yield from self.fill(piece)):
            whole += piece[:got]
            if len(whole) > limit:
                raise BrokenAnswerError(f"the answer is longer than {limit} bytes")
        return bytes(whole)

    def _begin_chunk_here(self) -> bool:
        """Read the head of the next chunk, if it is here and of the usual kind; tell whether it was."""
        incoming = self._incoming
        match = _USUAL_CHUNK.match(incoming.buffer, incoming.start, incoming.stop)
        if match is None or not self._has_chunk:
            return False
        self._left = int(match[1], 16)
        incoming.start = match.end()
        return True

    def _begin_chunk(self) -> Receiving[None]:
        """Receive the head of the next chunk; the last one brings the end of the body, trailers included."""
        incoming = self._incoming
        if self._has_chunk and (yield from incoming.line(2)) not in (b"\r\n", b"\n"):
            raise BrokenAnswerError("a chunk does not end where it should")
        line = yield from incoming.line(MAX_CHUNK_LINE_BYTES)
        digits = line.partition(b";")[0].strip()
        if not re.fullmatch(rb"[0-9A-Fa-f]{1,15}", digits):
            raise BrokenAnswerError("a chunk has no size")
        self._left = int(digits, 16)
        self._has_chunk = True
        if not self._left:
            while (yield from incoming.line(MAX_HEAD_BYTES)) not in (b"\r\n", b"\n"):
                pass
            self._is_over = True


def request_bytes(path: str, host: str, headers: Mapping[str, str], body: bytes) -> bytes:
    """Return a POST request.

    Raises:
        ValueError: A header would end before its line does.
    """
    fields = {"host": host, **headers, "content-length": str(len(body))}
    if any(character in name + value for name, value in fields.items() for character in "\r\n\0"):
        raise ValueError("a header holds a line break")
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body
