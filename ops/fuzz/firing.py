"""Sends requests and says what came of each: a status, or how the connection ended."""

import http.client
import io
import json
import socket
import struct
from urllib.parse import urlsplit

from ops.fuzz.requests import End, Shot

TIMEOUT_S = 20.0


class ViolationError(Exception):
    """The server did what it must never do."""


def fire(url: str, shot: Shot, *, timeout_s: float = TIMEOUT_S, is_busy: bool = False) -> list[str]:
    """Send one request and return what came back: statuses, then how the connection ended, if it did.

    Args:
        url: Of the server.
        shot: What is sent, and what is owed.
        timeout_s: Without a byte for so long, the server hangs.
        is_busy: Others use it too, so it may refuse with 503.

    Raises:
        ViolationError: It hung, failed within, said nothing where it owes an answer, or refused without the
            envelope.
    """
    address = urlsplit(url)
    assert address.hostname is not None
    connection = socket.create_connection((address.hostname, address.port or 80), timeout_s)
    with connection:
        try:
            return _exchange(connection, shot, is_busy=is_busy)
        except TimeoutError:
            raise ViolationError("it hangs") from None


def _exchange(connection: socket.socket, shot: Shot, *, is_busy: bool) -> list[str]:
    try:
        connection.sendall(shot.data)
        if shot.end is End.HALF_CLOSE:
            connection.shutdown(socket.SHUT_WR)
    except (BrokenPipeError, ConnectionResetError):
        # It was refused before it was all there; the refusal may still be read.
        pass
    if shot.end is End.LEAVE:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return ["left"]
    outcomes: list[str] = []
    reader = Reader(connection)
    method = shot.data.partition(b" ")[0].decode("latin-1")
    while len(outcomes) < shot.num_answers:
        outcome = _answer(reader, method, is_busy=is_busy)
        outcomes.append(outcome)
        if not outcome.isdigit():
            break
    if shot.end is End.READ and not outcomes[0].isdigit():
        raise ViolationError(f"no answer, but {outcomes[0]}")
    return outcomes


class Reader(io.BufferedReader):
    """What a socket receives, for several answers one after another: it keeps what was read ahead."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(socket.SocketIO(connection, "r"))

    def makefile(self, _: str) -> "Reader":
        """Return itself, as a socket would return a file."""
        return self

    def close(self) -> None:
        """Stay open, since an answer closes what it was read from."""


def _answer(reader: Reader, method: str, *, is_busy: bool) -> str:
    """Read one answer; return its status, or what came in its place."""
    response = http.client.HTTPResponse(reader, method=method)  # type: ignore[arg-type]
    try:
        response.begin()
        body = response.read()
    except http.client.RemoteDisconnected:
        return "closed"
    except ConnectionResetError:
        return "reset"
    except (http.client.IncompleteRead, ValueError):
        return "cut"
    except http.client.HTTPException as error:
        raise ViolationError(f"no HTTP came back: {error!r}") from None
    if response.status >= 500 and not (is_busy and response.status == 503):
        raise ViolationError(f"{response.status}: {body[:300]!r}")
    if response.status >= 400 and method != "HEAD":
        _check_envelope(response, body)
    return str(response.status)


def _check_envelope(response: http.client.HTTPResponse, body: bytes) -> None:
    try:
        fields = set(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        fields = set()
    if fields != {"message", "type", "param", "code"} or not response.getheader("x-request-id"):
        raise ViolationError(f"{response.status} without the envelope: {body[:300]!r}")
