"""A real server on a real socket, in a thread of the test process."""

import asyncio
import http.client
import json
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from engine.engine import Engine, Load
from engine.loading import load as real_load
from service.server import build_server
from service.settings import Settings

DEADLINE_S = 15


def eventually(condition: Callable[[], bool], *, within_s: float = 20.0) -> None:
    """Wait for something that another thread is about to do."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


class Reply:
    """Status, headers and body of one answer."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = response.headers
        self.body = response.read()

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        assert self.headers.get_content_type() == "application/json"
        assert set(self.json) == {"error"}
        assert set(self.json["error"]) == {"message", "type", "param", "code"}
        return self.json["error"]


class ServerThread:
    """Runs uvicorn and an engine on an event loop of their own."""

    def __init__(self, settings: Settings, load: Load = real_load) -> None:
        self._settings = settings
        self._load = load
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))
        self._listening = threading.Event()
        self.url = ""

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.engine = Engine(self._settings.engine_config(), self._load)
        self.server = build_server(self._settings, self.engine)
        serving = asyncio.ensure_future(self.server.serve())
        self.url = await self.server.address()
        self._listening.set()
        await serving

    def start(self, *, wait_ready: bool = True) -> None:
        self._thread.start()
        assert self._listening.wait(DEADLINE_S)
        if wait_ready:
            self.on_loop(self.engine.wait_ready())

    def on_loop(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(DEADLINE_S)

    def stop(self) -> None:
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.server.begin_drain)
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=DEADLINE_S)

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> Reply:
        connection = self.connect()
        sent = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method, path, sent, {"content-type": "application/json"} | (headers or {}))
        try:
            return Reply(connection.getresponse())
        finally:
            connection.close()

    def chat(self, headers: dict[str, str] | None = None, **fields: Any) -> Reply:
        body = {"messages": [{"role": "user", "content": "Say hi."}], "temperature": 0, **fields}
        return self.request("POST", "/v1/chat/completions", body, headers)
