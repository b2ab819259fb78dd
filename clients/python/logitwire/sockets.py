"""Connections of threads: opened, written to, and kept for the next call."""

import os
import selectors
import socket
import ssl
import threading

from logitwire.config import MAX_IDLE, Config
from logitwire.errors import APIConnectionError, APITimeoutError

HAS_SCATTER = hasattr(socket.socket, "recvmsg_into")


class Idle:
    """Connections that wait for the next call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connections: list[socket.socket] = []
        self._pid = os.getpid()

    def take(self) -> socket.socket | None:
        """Return a connection that the server has not closed, if there is one."""
        while True:
            with self._lock:
                if self._pid != os.getpid():
                    # A fork shares its parent's connections, and must not speak on them. Closing its own
                    # ends of them says nothing to the server.
                    for connection in self._connections:
                        connection.close()
                    self._connections, self._pid = [], os.getpid()
                if not self._connections:
                    return None
                connection = self._connections.pop()
            if not _is_readable(connection):
                return connection
            connection.close()

    def put(self, connection: socket.socket) -> None:
        """Keep a connection for the next call."""
        with self._lock:
            if len(self._connections) < MAX_IDLE and self._pid == os.getpid():
                self._connections.append(connection)
                return
        connection.close()

    def close(self) -> None:
        """Close all."""
        with self._lock:
            connections, self._connections = self._connections, []
        for connection in connections:
            connection.close()


def _is_readable(connection: socket.socket) -> bool:
    """Tell whether bytes, or the end of the connection, came while nobody asked for any."""
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        return bool(selector.select(0))


def connect(config: Config) -> socket.socket:
    """Open a connection.

    Raises:
        APIConnectionError: It cannot be opened.
    """
    try:
        connection = socket.create_connection((config.host, config.port), config.connect_timeout_s)
    except OSError as error:
        kind = APITimeoutError if isinstance(error, TimeoutError) else APIConnectionError
        raise kind(f"no connection to {config.netloc}: {error}") from error
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if config.context is not None:
            connection = config.context.wrap_socket(connection, server_hostname=config.host)
        connection.settimeout(config.timeout_s)
    except OSError as error:
        connection.close()
        raise APIConnectionError(f"no connection to {config.netloc}: {error}") from error
    return connection


def send(connection: socket.socket, request: bytes) -> OSError | None:
    """Send a request. A server may refuse it before it has read all, so a failure is not yet one.

    Raises:
        APITimeoutError: The server does not read.
    """
    try:
        connection.sendall(request)
    except TimeoutError as error:
        raise APITimeoutError(f"the server did not take the request: {error}") from error
    except OSError as error:
        return error
    return None


def receive(connection: socket.socket, wanted: memoryview, spare: memoryview) -> int:
    """Receive into a buffer, and what else is there into a second one, with one call; return the sum."""
    if wanted.obj is spare.obj or isinstance(connection, ssl.SSLSocket) or not HAS_SCATTER:
        return connection.recv_into(wanted)
    return connection.recvmsg_into((wanted, spare))[0]
