"""Limits below the app: how large and slow a request may be, and what becomes of a body that nobody reads."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from litestar.types import ASGIApp, Receive, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from schemas.errors import ErrorCode
from service.errors import ServiceError, encode_error
from service.protocol import SteadyProtocol
from service.telemetry import new_request_id

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 * 2**10
"""Of the request line and all headers together; of trailers too."""

MAX_URL_BYTES = 16 * 2**10
MAX_HEADERS = 256

HEAD_TIMEOUT_S = 30.0
"""For the whole head of a request."""

BODY_TIMEOUT_S = 60.0
"""Between two parts of a body."""

LINGER_S = 2.0
"""For which what a client still sends is read and dropped, so that it gets to reading its refusal."""

LINGER_BYTES = 64 * 2**20
"""That are dropped at most."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """How a request is refused that never reaches the app."""

    status: int
    code: ErrorCode
    message: str


TOO_LARGE = Refusal(431, "request_too_large", f"all headers together may have {MAX_HEAD_BYTES} bytes")


class LimitedProtocol(SteadyProtocol):
    """uvicorn's connection, which takes heads of any size and at any pace, with limits and with envelopes."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin."""
        super().connection_made(transport)
        self._timer: asyncio.TimerHandle | None = None
        self._answering: RequestResponseCycle | None = None
        self._is_in_body = False
        self._is_refused = False
        self._num_head_bytes = 0
        self._num_pending_bytes = 0
        self.url, self.headers = b"", []
        self._set_timer(HEAD_TIMEOUT_S)

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._set_timer(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what came."""
        if self._is_refused:
            return
        self._num_pending_bytes += len(data)
        super().data_received(data)
        if self._is_refused or self.transport.is_closing():
            return
        if self._num_pending_bytes > MAX_HEAD_BYTES:
            # The parser holds a head, or the trailers behind a body, that has not ended yet.
            self._refuse(self._excess() or TOO_LARGE)
        elif self._is_in_body:
            self._set_timer(BODY_TIMEOUT_S)
        elif self.cycle is not None and not self.cycle.response_complete:
            self._set_timer(None)
        elif self._timer is None:
            self._set_timer(HEAD_TIMEOUT_S)

    def on_message_begin(self) -> None:
        """Begin a request."""
        super().on_message_begin()
        self._num_head_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, or a trailer."""
        super().on_header(name, value)
        self._num_head_bytes += len(name) + len(value) + 4

    def on_headers_complete(self) -> None:
        """Begin the answer, unless the head is too large."""
        if self._excess() is not None:
            # The parser stops here, and has the request refused.
            raise ValueError("the head is too large")
        super().on_headers_complete()
        self._is_in_body = True

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        self._num_pending_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request."""
        self._num_pending_bytes = 0
        self._is_in_body = False
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what the parser does not take."""
        self._refuse(self._excess() or Refusal(400, "malformed_request", "this is no valid HTTP request"))

    def _excess(self) -> Refusal | None:
        """Return how the head is refused, if it is too large so far."""
        if len(self.url) > MAX_URL_BYTES:
            return Refusal(414, "request_too_large", f"an address may have {MAX_URL_BYTES} bytes")
        if len(self.headers) > MAX_HEADERS:
            return Refusal(431, "request_too_large", f"a request may have {MAX_HEADERS} headers")
        if self._num_head_bytes > MAX_HEAD_BYTES:
            return TOO_LARGE
        return None

    def _refuse(self, refusal: Refusal) -> None:
        """Answer without the app, and close once the client has had time to read it."""
        self._is_refused = True
        request_id = new_request_id()
        logger.info(
            "connection refused",
            extra={
                "request_id": request_id.decode(),
                "status": refusal.status,
                "reason": refusal.message,
            },
        )
        if self._answering is not None and not self._answering.response_complete:
            if self._answering.response_started:
                # Nothing can be said in the middle of another answer.
                self.transport.abort()
                return
            self._forget(self._answering)
        body = encode_error(ServiceError(refusal.code, refusal.message))
        headers = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"x-request-id", request_id),
            (b"connection", b"close"),
        ]
        head = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
        self.transport.write(STATUS_LINE[refusal.status] + head + b"\r\n" + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._set_timer(LINGER_S)

    def _forget(self, cycle: RequestResponseCycle) -> None:
        """Tell who is about to answer that nobody listens any more."""
        self.pipeline.clear()
        cycle.disconnected = True
        cycle.message_event.set()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        super()._start_asgi_task(cycle, app)
        self._answering = cycle

    def _set_timer(self, seconds: float | None) -> None:
        """Give the client so long from now on."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)


class Leftovers:
    """Reads and drops what is left of a body once the answer is out.

    A connection that closes with unread bytes is reset, and its client may never see why.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        names = {name for name, _ in scope["headers"]}
        waits = b"expect" in names
        is_open = b"content-length" in names or b"transfer-encoding" in names

        async def receive_watched() -> Any:
            nonlocal is_open
            message = await receive()
            is_open = is_open and bool(message.get("more_body"))
            return message

        async def send_watched(message: Any) -> None:
            if message["type"] == "http.response.start" and is_open and waits:
                # It need not send the body any more, and then nobody could find its next request.
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
            if not is_last or not is_open or waits:
                await send(message)
                return
            message["more_body"] = True
            await send(message)
            await _drop(receive_watched, lambda: is_open)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            if is_open:
                scope["state"]["abort"]()

        await self._app(scope, receive_watched, send_watched)


async def _drop(receive: Receive, is_open: Callable[[], bool]) -> None:
    """Take what comes until a body ends, or it has been enough."""
    left = LINGER_BYTES
    try:
        async with asyncio.timeout(LINGER_S):
            while is_open() and left > 0:
                message: Any = await receive()
                left -= len(message.get("body", b""))
    except TimeoutError:
        pass
