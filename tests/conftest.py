"""Fixtures for all layers, and the order: fast tests first, whatever the random order is."""

import os
from collections.abc import Callable, Iterator

import hypothesis
import pytest

from engine.engine import Load
from engine.loading import load as real_load
from service.settings import Settings
from tests.serving import ServerThread

# The same examples each time, so that a change is judged by what it changes; and no limit on the time of one,
# since a busy machine is no fault. HYPOTHESIS_PROFILE=explore looks for new examples.
hypothesis.settings.register_profile(
    "steady",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile("explore", deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or "steady")


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
