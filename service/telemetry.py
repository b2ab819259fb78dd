"""Request ids and structured log lines: one per request, as JSON or as readable text.

Prompt text is never logged.
"""

import json
import logging
import re
import time
import uuid
from typing import Any

from litestar.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger("service.request")

_SANE_ID = re.compile(rb"[A-Za-z0-9._:@/+=-]{1,128}")
_STANDARD = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}


def note(scope: Scope, **facts: object) -> None:
    """Add facts to the request's log line."""
    scope["state"]["log"].update(facts)


def new_request_id() -> bytes:
    """Return an id for a request that brought none."""
    return uuid.uuid4().hex.encode()


class RequestLog:
    """Wraps the whole app: gives each request its id, answers HEAD like GET, and logs one line.

    Outside the framework, since it answers unknown paths and methods before any of its own middleware runs.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = dict(scope["headers"]).get(b"x-request-id", b"")
        request_id = sent if _SANE_ID.fullmatch(sent) else new_request_id()
        facts: dict[str, Any] = {"request_id": request_id.decode()}
        scope.setdefault("state", {})["log"] = facts
        # ASGI has no way to cut a connection whose reader has stalled; uvicorn's cycle, whose method
        # ``send`` is, holds the transport that has one.
        transport = getattr(getattr(send, "__self__", None), "transport", None)
        scope["state"]["abort"] = getattr(transport, "abort", lambda: None)
        method = scope["method"]
        if method == "HEAD":
            # A copy: uvicorn reads its own, and leaves the body out of what it sends.
            scope = {**scope, "method": "GET"}
        began = time.perf_counter()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                facts["status"] = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            path, seconds = scope["path"], round(time.perf_counter() - began, 6)
            is_probe = path in ("/health", "/ready")
            level = logging.DEBUG if is_probe else logging.INFO
            logger.log(level, "request", extra={"method": method, "path": path, **facts, "seconds": seconds})


class JsonFormatter(logging.Formatter):
    """One JSON object per event; the record's extra fields stand beside its message."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_extra(record),
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """One readable line per event."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        extra = " ".join(f"{name}={_on_one_line(value)}" for name, value in _extra(record).items())
        return f"{super().format(record)} {extra}".rstrip()


def _on_one_line(value: object) -> str:
    """Return a value such that it can neither begin a line nor move the cursor."""
    text = str(value)
    return text if text.isprintable() else repr(text)


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


class _NoAbortNoise(logging.Filter):
    """Drops uvicorn's complaint about answers that end early: that is how a failed stream is aborted."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "returned without completing response" not in record.getMessage()


def configure_logging(level: str, form: str) -> None:
    """Send every log event to standard error in one form."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("uvicorn.error").addFilter(_NoAbortNoise())
