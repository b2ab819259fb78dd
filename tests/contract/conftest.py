"""One server that clients talk to, and a wall around this machine."""

import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from service.settings import Settings
from tests.clients import TALKERS, Talker
from tests.replies import replying_load
from tests.serving import ServerThread

Talk = Callable[..., Talker]


@pytest.fixture(scope="session")
def replying() -> Iterator[ServerThread]:
    """A server whose scripted model answers what it is asked; see `tests/replies.py`."""
    settings = Settings(model_name="scripted", port=0, reasoning_parser="<think>,</think>", drain_timeout=5.0)
    server = ServerThread(settings, replying_load())
    server.start()
    yield server
    server.stop()


@pytest.fixture
def only_this_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test in which anything looks up or connects to another machine, however well it hides that."""
    tried: list[Any] = []
    look_up, connect = socket.getaddrinfo, socket.socket.connect

    def checked_look_up(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host not in (None, "localhost", "127.0.0.1"):
            tried.append(host)
            raise socket.gaierror(f"a test looks up {host}")
        return look_up(host, *args, **kwargs)

    def checked_connect(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX and address[0] != "127.0.0.1":
            tried.append(address)
            raise ConnectionRefusedError(f"a test connects to {address}")
        connect(self, address)

    monkeypatch.setattr(socket, "getaddrinfo", checked_look_up)
    monkeypatch.setattr(socket.socket, "connect", checked_connect)
    yield
    assert not tried


@pytest.fixture(params=TALKERS)
def talk(request: pytest.FixtureRequest) -> Iterator[Talk]:
    """Make clients of either kind; they are closed at the end."""
    talkers: list[Talker] = []

    def make(url: str, **options: Any) -> Talker:
        talkers.append(TALKERS[request.param](url, **options))
        return talkers[-1]

    yield make
    for talker in talkers:
        talker.close()
