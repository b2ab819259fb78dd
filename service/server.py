"""uvicorn, with a drain before it stops: no new work, what runs may finish, and exit code 0."""

import asyncio
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from litestar.types import ASGIApp
from uvicorn.server import HANDLED_SIGNALS

from engine.engine import Engine
from engine.errors import LoadError
from service.app import create_app
from service.limits import LimitedProtocol
from service.settings import Settings, keys_of
from service.tuning import spare_what_stays

logger = logging.getLogger(__name__)

Wrap = Callable[[ASGIApp], ASGIApp]

BACKLOG = 2048
"""Connections that wait to be accepted."""

FAREWELL_S = 5
"""Seconds for failed answers to reach their clients at the end."""

ECHO_S = 1.0
"""Seconds in which signals count once: a terminal, GNU timeout and a supervisor may all pass on one."""


class DrainingServer(uvicorn.Server):
    """Serves until a signal, then drains the engine while it still answers, with 503 for new work."""

    def __init__(self, config: uvicorn.Config, engine: Engine, drain_timeout_s: float) -> None:
        super().__init__(config)
        self._engine = engine
        self._drain_timeout_s = drain_timeout_s
        self._draining: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listening = asyncio.Event()
        self._hurry = asyncio.Event()
        self._signalled_at = -ECHO_S
        self._has_ended = False

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve; returns after the drain."""
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening."""
        await super().startup(sockets)
        self._listening.set()

    async def address(self) -> str:
        """Wait until the server listens; return its URL."""
        await self._listening.wait()
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals from here on, and behind the end too.

        uvicorn would restore the defaults there, and an echo would end the process with another exit code.
        """
        if threading.current_thread() is threading.main_thread():
            for each in HANDLED_SIGNALS:
                signal.signal(each, self.handle_exit)
        yield
        self._has_ended = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin the drain at the first signal, end it at the second, and stop without a word at the third."""
        # uvicorn would raise the signal again at its end, and the exit code would not be 0.
        assert self._loop is not None
        now = time.monotonic()
        if now - self._signalled_at < ECHO_S:
            return
        self._signalled_at = now
        if self._has_ended:
            # Whoever still waits for threads has had enough.
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        else:
            self._loop.call_soon_threadsafe(self.begin_drain)

    def begin_drain(self) -> None:
        """Begin the drain, or end it at once if it has begun; runs on the event loop."""
        if self._draining is None:
            self._draining = asyncio.ensure_future(self._drain())
        elif not self._hurry.is_set():
            self._hurry.set()
        else:
            self.force_exit = self.should_exit = True

    async def _drain(self) -> None:
        logger.info("draining", extra={"requests": self._engine.num_requests})
        waits = [
            asyncio.ensure_future(self._engine.drain(self._drain_timeout_s)),
            asyncio.ensure_future(self._hurry.wait()),
        ]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        # What is left fails here, and its answers say so before the connections close.
        await self._engine.stop()
        self.should_exit = True


def ignore_signals() -> None:
    """Let the process end with its exit code, now that nothing is left to wait for."""
    for each in HANDLED_SIGNALS:
        signal.signal(each, signal.SIG_IGN)


def build_server(settings: Settings, engine: Engine, wrap: Wrap | None = None) -> DrainingServer:
    """Return the server of an engine, not started yet.

    Args:
        settings: Of the service.
        engine: Not started yet.
        wrap: Puts something around the app; for benchmarks.
    """
    app = create_app(settings, engine)
    config = uvicorn.Config(
        app if wrap is None else wrap(app),
        host=settings.host,
        port=settings.port,
        http=LimitedProtocol,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        timeout_graceful_shutdown=FAREWELL_S,
    )
    return DrainingServer(config, engine, settings.drain_timeout)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket whose connections send at once what is written to them.

    Raises:
        OSError: The address cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    # asyncio sets TCP_NODELAY only on sockets that are TCP by name, and this one leaves that open. Head and
    # body of an answer are two writes: without it the second waits 40 ms for the client to confirm the first.
    return socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP, listener.detach())


async def run(settings: Settings, engine: Engine, wrap: Wrap | None = None) -> int:
    """Serve until a signal; return the exit code.

    Raises:
        OSError: The address cannot be listened on.
    """
    server = build_server(settings, engine, wrap)
    # Here rather than in uvicorn, which would end the process with a trace if the port is taken.
    serving = asyncio.ensure_future(server.serve([listen(settings.host, settings.port)]))
    loading = asyncio.ensure_future(engine.wait_ready())
    await asyncio.wait((serving, loading), return_when=asyncio.FIRST_COMPLETED)
    code = 0
    if loading.done():
        try:
            loading.result()
        except LoadError as error:
            logger.error("giving up", extra={"failure": str(error)})
            print(f"logitwire: {error}", file=sys.stderr, flush=True)
            server.should_exit = True
            code = 1
        else:
            spare_what_stays()
            model = settings.served_model_name or engine.info.name
            announce(await server.address(), model, needs_key=bool(keys_of(settings)))
    else:
        loading.cancel()
    await serving
    return code


def announce(address: str, model: str, *, needs_key: bool) -> None:
    """Print where the server is, and one line that shows it at work."""
    # Nobody can call all interfaces; from here, the server is on this one.
    reachable = address.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
    key = """-H "authorization: Bearer $LOGITWIRE_API_KEY" """ if needs_key else ""
    print(
        f"\nlogitwire serves {model} at {address}\n\nTry it:\n\n"
        f"curl -s {reachable}/v1/chat/completions {key}-H 'content-type: application/json' -d "
        """'{"messages": [{"role": "user", "content": "Say hi in three words."}], "max_tokens": 8, """
        """"temperature": 0, "return_logprobs": true}'\n""",
        flush=True,
    )
