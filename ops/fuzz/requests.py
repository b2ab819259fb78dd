"""Whole requests as bytes: a body, right or not, in a frame of HTTP that is right or not."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from enum import Enum, auto
from random import Random
from typing import Any

from ops.fuzz.bodies import MUTATIONS

ARROW = b"application/vnd.apache.arrow.stream"


class End(Enum):
    """What the client does once all is sent."""

    READ = auto()
    """It reads its answer, and the server owes it one."""

    READ_ANY = auto()
    """It reads until the server is done with it, which may close without a word."""

    HALF_CLOSE = auto()
    """It says that nothing more comes, in the middle of a request, and reads."""

    LEAVE = auto()
    """It closes, and whatever comes is lost."""


@dataclass(frozen=True, slots=True)
class Shot:
    """One connection's worth of bytes.

    Attributes:
        kind: What is wrong with it, for the table.
        data: All that is sent.
        end: What the client does then.
        num_answers: So many are owed, if one is.
    """

    kind: str
    data: bytes
    end: End = End.READ
    num_answers: int = 1


Frame = Callable[[Random, str, bytes], Shot]


def _head(path: str, *headers: bytes, version: bytes = b"HTTP/1.1", method: bytes = b"POST") -> bytes:
    lines = [method + b" " + path.encode() + b" " + version, *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n"


HOST = b"host: x"
JSON = b"content-type: application/json"


def _length(body: bytes) -> bytes:
    return b"content-length: %d" % len(body)


def _right(kind: str, chance: Random, path: str, body: bytes) -> Shot:
    """Return a well-framed request, of any form of answer, in one of the ways to state a length."""
    accept = b"accept: " + chance.choice((b"*/*", b"application/json", ARROW, ARROW + b";q=0.5, */*;q=0.1"))
    if chance.random() < 0.5:
        return Shot(kind, _head(path, HOST, JSON, accept, _length(body)) + body)
    step = chance.randint(1, max(1, len(body)))
    parts = [body[start : start + step] for start in range(0, len(body), step)]
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    return Shot(kind, _head(path, HOST, JSON, accept, b"transfer-encoding: chunked") + chunks + b"0\r\n\r\n")


def _short_length(chance: Random, path: str, body: bytes) -> Shot:
    length = chance.randrange(len(body))
    # What is left over reads as the beginning of another request.
    return Shot("length too small", _head(path, HOST, JSON, b"content-length: %d" % length) + body, End.READ)


def _long_length(chance: Random, path: str, body: bytes) -> Shot:
    length = len(body) + chance.choice((1, 100, 10**6))
    end = chance.choice((End.HALF_CLOSE, End.LEAVE))
    return Shot("length too large", _head(path, HOST, JSON, b"content-length: %d" % length) + body, end)


LENGTHS = (b"-1", b"+5", b"0x10", b"1e3", b"", b" ", b"5, 5", b"99999999999999999999999", b"\xb2", b"5 5")


def _bad_length(chance: Random, path: str, body: bytes) -> Shot:
    stated = b"content-length: " + chance.choice(LENGTHS)
    return Shot("length is no number", _head(path, HOST, JSON, stated) + body, End.HALF_CLOSE)


def _huge_length(_: Random, path: str, body: bytes) -> Shot:
    return Shot("length over the limit", _head(path, HOST, JSON, b"content-length: 999999999999") + body)


CHUNKS = (
    b"zz\r\n{}\r\n",
    b"-5\r\n{}",
    b"5\n{}\n",
    b"ffffffffffffffffff\r\n{}",
    b"2\r\n{}X\r\n0\r\n\r\n",
    b"2;" + b"e" * 9000,
)


def _bad_chunks(chance: Random, path: str, body: bytes) -> Shot:
    head = _head(path, HOST, JSON, b"transfer-encoding: chunked")
    chunks = chance.choice((*CHUNKS, b"%x\r\n%s" % (len(body) + 9, body), chance.randbytes(50)))
    return Shot("chunks are garbage", head + chunks, End.HALF_CLOSE)


def _smuggled(chance: Random, path: str, body: bytes) -> Shot:
    """Two lengths that disagree: proxies and servers that choose differently see different requests."""
    inner = _head("/v1/smuggled", HOST, method=b"GET")
    chunked = b"0\r\n\r\n" + inner
    fields = chance.choice(
        (
            (_length(chunked), b"transfer-encoding: chunked"),
            (b"transfer-encoding: chunked", b"content-length: 4"),
            (b"transfer-encoding: xchunked", _length(body)),
            (b"transfer-encoding: chunked, identity", _length(body)),
            (b"transfer-encoding: identity", b"transfer-encoding: chunked"),
            (b"transfer-encoding : chunked", _length(body)),
            (b"transfer-encoding:\x0bchunked", _length(body)),
            (_length(body), b"content-length: 0"),
            (_length(body), b"x: y\r\n transfer-encoding: chunked"),
        )
    )
    return Shot(
        "two lengths", _head(path, HOST, JSON, *fields) + chance.choice((chunked, body)), End.READ_ANY
    )


HEADERS = (
    *(b"x: a\x00b", b"x: \xff\xfe", b"\xff: 1", b"x y: 1", b": 1", b"x", b"x : 1", b"x: a\rb", b"x: a\n b"),
    *(b"x" * 70_000 + b": 1", b"x: " + b"y" * 70_000, b"\r\n".join([b"x: 1"] * 500), b"host: x\r\nhost: y"),
    *(
        b"accept: \xff",
        b"accept: " + b"a/b," * 4000,
        b"accept: */*;q=9",
        b"accept: a/b;q=nan",
        b"x-request-id: \xff",
    ),
    *(b"content-encoding: gzip", b"content-type: text/plain", b"content-type: ;;", b"expect: 100-continue"),
    *(
        b"expect: 200-ok",
        b"upgrade: websocket\r\nconnection: upgrade",
        b"upgrade: h2c\r\nconnection: upgrade",
    ),
    *(
        b"connection: close",
        b"connection: \xff",
        b"authorization: \xff",
        b"authorization: Bearer " + b"k" * 30_000,
    ),
    *(b"content-type: application/json; charset=utf-16", b"content-type: application/json; charset=\xff"),
    *(
        b"origin: null",
        b"cookie: " + b"a=b;" * 900,
        b"range: bytes=0-1",
        b"if-none-match: *",
        b"te: trailers",
    ),
)


def _odd_header(chance: Random, path: str, body: bytes) -> Shot:
    odd = chance.choice(HEADERS)
    headers = (HOST, odd, _length(body)) if b"content-type" in odd else (HOST, JSON, odd, _length(body))
    return Shot("odd headers", _head(path, *headers) + body, End.READ)


def _bare_lines(_: Random, path: str, body: bytes) -> Shot:
    return Shot("bare line feeds", _head(path, HOST, JSON, _length(body)).replace(b"\r\n", b"\n") + body)


def _no_host(_: Random, path: str, body: bytes) -> Shot:
    return Shot("no host", _head(path, JSON, _length(body)) + body)


VERSIONS = (b"HTTP/0.9", b"HTTP/2.0", b"HTTP/9.9", b"HTTP/1.1 ", b"http/1.1", b"", b"ICY")


def _version(chance: Random, path: str, body: bytes) -> Shot:
    version = chance.choice(VERSIONS)
    return Shot("other versions", _head(path, HOST, JSON, _length(body), version=version) + body)


def _old_version(_: Random, path: str, body: bytes) -> Shot:
    return Shot("HTTP/1.0", _head(path, JSON, _length(body), version=b"HTTP/1.0") + body)


PATHS = (
    *(
        "/v1/%00",
        "/v1/%ff%fe",
        "/v1/models/%2e%2e%2f%2e%2e",
        "/../../etc/passwd",
        "//v1/models",
        "/v1/models/" + "a" * 9000,
    ),
    *(
        "/schema/..%2f..%2fservice",
        "/schema/%2fetc%2fpasswd",
        "*",
        "http://y/health",
        "http://[",
        "/?" + "a=b&" * 5000,
    ),
    *(
        "/v1/chat/completions/",
        "/V1/CHAT/COMPLETIONS",
        "/v1/models/\x7f",
        "/health#x",
        "/health;a=b",
        "/%",
        "/%zz",
        "",
    ),
)
METHODS = (
    b"GET",
    b"HEAD",
    b"PUT",
    b"DELETE",
    b"OPTIONS",
    b"TRACE",
    b"PATCH",
    b"CONNECT",
    b"post",
    b"PRI",
    b"P\x00ST",
)


def _other_path(chance: Random, path: str, body: bytes) -> Shot:
    head = _head(chance.choice(PATHS), HOST, JSON, _length(body), method=chance.choice((b"GET", b"POST")))
    return Shot("other paths", head + body)


def _method(chance: Random, path: str, body: bytes) -> Shot:
    method = chance.choice(METHODS)
    # Behind CONNECT and HEAD no body comes that an ordinary reader would see.
    end = End.READ_ANY if method in (b"HEAD", b"CONNECT") else End.READ
    return Shot("other methods", _head(path, HOST, JSON, _length(body), method=method) + body, end)


def _pipelined(chance: Random, path: str, body: bytes) -> Shot:
    one = _head(path, HOST, JSON, _length(body)) + body
    return Shot("pipelined", one + _head("/health", HOST, method=b"GET") + one, num_answers=3)


def _left(chance: Random, path: str, body: bytes) -> Shot:
    data = _head(path, HOST, JSON, b"accept: " + chance.choice((ARROW, b"*/*")), _length(body)) + body
    return Shot(
        "client leaves", data[: chance.choice((1, len(data) // 2, len(data) - 1, len(data)))], End.LEAVE
    )


def _noise(chance: Random, path: str, body: bytes) -> Shot:
    noise = (
        chance.randbytes(200),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01",
        b"\r\n" * 900,
        b"\x00",
    )
    return Shot("no HTTP", chance.choice(noise), End.HALF_CLOSE)


def _flipped(chance: Random, path: str, body: bytes) -> Shot:
    data = bytearray(_head(path, HOST, JSON, _length(body)) + body)
    for _ in range(chance.randint(1, 3)):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return Shot("bits of a request flipped", bytes(data), End.HALF_CLOSE)


FRAMES: list[Frame] = [
    *(
        _short_length,
        _long_length,
        _bad_length,
        _huge_length,
        _bad_chunks,
        _smuggled,
        _odd_header,
        _bare_lines,
    ),
    *(_no_host, _version, _old_version, _other_path, _method, _pipelined, _left, _noise, _flipped),
]


def shot(examples: list[tuple[str, dict[str, Any]]], seed: int, index: int) -> Shot:
    """Return one of the requests of a seed; always the same one."""
    chance = Random(f"{seed}/{index}")  # noqa: S311 - no secret
    path, body = chance.choice(examples)
    if chance.random() < 0.5:
        name = chance.choice(list(MUTATIONS))
        return _right(f"body: {name}", chance, path, MUTATIONS[name](chance, deepcopy(body)))
    return chance.choice(FRAMES)(chance, path, MUTATIONS["as it is"](chance, body))
