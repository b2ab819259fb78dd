"""Both Python clients behind one face, and a server that misbehaves as it is told."""

import asyncio
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from logitwire import AsyncClient, Client, Row
from tests.serving import DEADLINE_S, ServerThread

MESSAGES = [{"role": "user", "content": "Say hi."}]


class SyncTalker:
    """Calls a :class:`Client`."""

    def __init__(self, url: str, **options: Any) -> None:
        self.client: Any = Client(url, **options)
        self.pauses: list[float] = []
        self.client._sleep = self.pauses.append

    def call(self, name: str, *args: Any, **options: Any) -> Any:
        return getattr(self.client, name)(*args, **options)

    def rows(self, name: str, *args: Any, until: int | None = None, **options: Any) -> tuple[list[Row], Any]:
        """Return the rows of a stream, and the stream; with ``until`` it is left behind so many rows."""
        found: list[Row] = []
        with getattr(self.client, f"{name}_rows")(*args, **options) as stream:
            for row in stream:
                found.append(row)
                if len(found) == until:
                    break
        return found, stream

    def close(self) -> None:
        self.client.close()


class AsyncTalker:
    """Calls an :class:`AsyncClient` on an event loop of its own."""

    def __init__(self, url: str, **options: Any) -> None:
        self.runner = asyncio.Runner()
        self.client: Any = AsyncClient(url, **options)
        self.pauses: list[float] = []

        async def sleep(seconds: float) -> None:
            self.pauses.append(seconds)

        self.client._sleep = sleep

    def call(self, name: str, *args: Any, **options: Any) -> Any:
        return self.runner.run(getattr(self.client, name)(*args, **options))

    def rows(self, name: str, *args: Any, until: int | None = None, **options: Any) -> tuple[list[Row], Any]:
        """Return the rows of a stream, and the stream; with ``until`` it is left behind so many rows."""
        found: list[Row] = []

        async def read() -> Any:
            async with getattr(self.client, f"{name}_rows")(*args, **options) as stream:
                async for row in stream:
                    found.append(row)
                    if len(found) == until:
                        break
            return stream

        return found, self.runner.run(read())

    def close(self) -> None:
        self.runner.run(self.client.close())
        self.runner.close()


Talker = SyncTalker | AsyncTalker

TALKERS: dict[str, Callable[..., Talker]] = {"sync": SyncTalker, "async": AsyncTalker}


@dataclass(frozen=True)
class Reply:
    """What to answer to one request, and what to do then."""

    data: bytes
    then: Literal["keep", "close", "reset", "hang"] = "keep"


@dataclass
class FakeServer:
    """Gives one reply after another, whichever connection asks; then closes all that comes."""

    replies: list[Reply]
    context: ssl.SSLContext | None = None
    url: str = ""
    requests: list[bytes] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    connections: list[socket.socket] = field(default_factory=list)

    @property
    def num_connections(self) -> int:
        return len(self.connections)

    def stop(self) -> None:
        """End all that still waits for a client."""
        self.over.set()
        for connection in self.connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def serve(self, listener: socket.socket) -> None:
        threads = []
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                break
            self.connections.append(connection)
            threads.append(threading.Thread(target=self._talk, args=(connection,)))
            threads[-1].start()
        for thread in threads:
            thread.join(DEADLINE_S)

    def _talk(self, connection: socket.socket) -> None:
        connection.settimeout(DEADLINE_S)
        try:
            if self.context is not None:
                place = self.connections.index(connection)
                connection = self.context.wrap_socket(connection, server_side=True)
                self.connections[place] = connection
            while (request := _request(connection)) and self.replies:
                self.requests.append(request)
                reply = self.replies.pop(0)
                connection.sendall(reply.data)
                if reply.then == "hang":
                    self.over.wait(DEADLINE_S)
                if reply.then == "reset":
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                if reply.then != "keep":
                    break
        except OSError:
            pass
        finally:
            connection.close()


def _request(connection: socket.socket) -> bytes:
    received = b""
    while piece := connection.recv(2**16):
        received += piece
        head, mark, body = received.partition(b"\r\n\r\n")
        lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        if mark and len(body) == int(lengths[0].split(b":")[1]):
            return received
    return b""


@contextmanager
def fake_server(
    replies: Sequence[Reply | bytes], context: ssl.SSLContext | None = None
) -> Iterator[FakeServer]:
    server = FakeServer([each if isinstance(each, Reply) else Reply(each) for each in replies], context)
    listener = socket.create_server(("127.0.0.1", 0))
    scheme = "http" if context is None else "https"
    server.url = f"{scheme}://127.0.0.1:{listener.getsockname()[1]}"
    thread = threading.Thread(target=server.serve, args=(listener,))
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        # Only a shutdown wakes a thread that waits for connections.
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def recorded_answer(server: ServerThread, path: str, body: bytes, accept: str) -> bytes:
    """Return an answer byte for byte as a real server sends it."""
    connection = server.connect()
    connection.connect()
    assert connection.sock is not None
    request = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\naccept: {accept}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    connection.sock.sendall(request.encode() + body)
    received = b""
    while piece := connection.sock.recv(2**16):
        received += piece
    connection.close()
    return received.replace(b"connection: close\r\n", b"", 1)


def refusal(status: int, code: str, *headers: str) -> bytes:
    """Return an error as the server sends it."""
    body = b'{"error":{"message":"no","type":"server_error","param":null,"code":"%b"}}' % code.encode()
    lines = [f"HTTP/1.1 {status} No", "content-type: application/json", f"content-length: {len(body)}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + body
