"""Fixtures for all layers, and the order: fast tests first, whatever the random order is."""

from collections.abc import Callable, Iterator

import pytest

from engine.engine import Load
from engine.loading import load as real_load
from service.settings import Settings
from tests.serving import ServerThread


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("model") is not None)


Serve = Callable[..., ServerThread]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start servers on free ports of this process; all are stopped at the end."""
    servers: list[ServerThread] = []

    def start(load: Load = real_load, **settings: object) -> ServerThread:
        values = {"model_name": "scripted", "port": 0, "drain_timeout": 5.0, **settings}
        server = ServerThread(Settings(**values), load)
        servers.append(server)
        server.start()
        return server

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="module")
def scripted() -> Iterator[ServerThread]:
    """One server with the scripted model for a whole module."""
    server = ServerThread(Settings(model_name="scripted", port=0, drain_timeout=5.0))
    server.start()
    yield server
    server.stop()
