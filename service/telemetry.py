"""Request ids and structured log lines: one per request, as JSON or as readable text.

Texts of prompts and completions are logged only if ``LOG_PROMPTS`` asks for it. So a trace has no message of
an exception that may repeat what it was given.
"""

import json
import logging
import re
import time
import traceback
import uuid
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import Any

from litestar.types import ASGIApp, Message, Receive, Scope, Send

from service.metrics import UNKNOWN_ROUTE, Metrics
from service.protocol import cut

logger = logging.getLogger("service.request")

_SANE_ID = re.compile(rb"[A-Za-z0-9._:@/+=-]{1,128}")
MAX_LOGGED_TEXTS = 8
MAX_LOGGED_CHARACTERS = 2000
"""Of each text."""

MACHINERY = (RuntimeError, OSError, MemoryError, ImportError)
"""What libraries and the system raise about themselves; torch's errors are among them."""

MAX_CAUSES = 10

_STANDARD = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}


def note(scope: Scope, **facts: object) -> None:
    """Add facts to the request's log line; what is ``None`` is none."""
    scope["state"]["log"].update({name: fact for name, fact in facts.items() if fact is not None})


def note_texts(scope: Scope, prompts: Sequence[str], completions: Sequence[str]) -> None:
    """Add the beginnings of texts to the request's log line."""
    beginnings = (
        [text[:MAX_LOGGED_CHARACTERS] for text in each[:MAX_LOGGED_TEXTS]] for each in (prompts, completions)
    )
    note(scope, **dict(zip(("prompts", "completions"), beginnings, strict=True)))


def new_request_id() -> bytes:
    """Return an id for a request that brought none."""
    return uuid.uuid4().hex.encode()


class RequestLog:
    """Wraps the whole app: gives each request its id, answers HEAD like GET, and logs one line.

    Outside the framework, since it answers unknown paths and methods before any of its own middleware runs.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, *, logs_texts: bool) -> None:
        """Wrap an app.

        Args:
            app: What answers.
            metrics: Where each request is counted.
            logs_texts: Whether answers may note their texts.
        """
        self._app = app
        self._metrics = metrics
        self._logs_texts = logs_texts

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = dict(scope["headers"]).get(b"x-request-id", b"")
        request_id = sent if _SANE_ID.fullmatch(sent) else new_request_id()
        facts: dict[str, Any] = {"request_id": request_id.decode()}
        scope.setdefault("state", {})["log"] = facts
        scope["state"]["logs_texts"] = self._logs_texts
        # ASGI has no way to cut a connection whose reader has stalled; uvicorn's cycle, whose method
        # ``send`` is, holds the transport that has one.
        transport = getattr(getattr(send, "__self__", None), "transport", None)
        scope["state"]["abort"] = (lambda: None) if transport is None else partial(cut, transport)
        method = scope["method"]
        if method == "HEAD":
            # A copy: uvicorn reads its own, and leaves the body out of what it sends.
            scope = {**scope, "method": "GET"}
        began = time.perf_counter()
        num_bytes = 0

        async def send_with_id(message: Message) -> None:
            nonlocal num_bytes
            if message["type"] == "http.response.start":
                facts["status"] = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            elif message["type"] == "http.response.body":
                num_bytes += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            path, seconds = scope["path"], round(time.perf_counter() - began, 6)
            route = scope.get("path_template") or UNKNOWN_ROUTE
            self._metrics.served(route, facts.get("status"), seconds)
            is_probe = path in ("/health", "/ready")
            level = logging.DEBUG if is_probe else logging.INFO
            line = {"method": method, "route": route, "path": path, **facts, "bytes": num_bytes}
            logger.log(level, "request", extra={**line, "seconds": seconds})


class _Formatter(logging.Formatter):
    def __init__(
        self, fmt: str | None = None, datefmt: str | None = None, *, shows_texts: bool = False
    ) -> None:
        super().__init__(fmt, datefmt)
        self._shows_texts = shows_texts

    def formatException(  # noqa: N802 - named by the library
        self, ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
    ) -> str:
        """Return the trace of an exception and of what caused it, the first cause first."""
        chain: list[str] = []
        error = ei[1]
        while error is not None and len(chain) < MAX_CAUSES:
            lines = traceback.format_tb(error.__traceback__)
            message = f": {error}" if self._shows_texts or isinstance(error, MACHINERY) else ""
            chain.append("".join([*lines, f"{type(error).__module__}.{type(error).__qualname__}{message}"]))
            error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        return "\n\n".join(reversed(chain))


class JsonFormatter(_Formatter):
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


class TextFormatter(_Formatter):
    """One readable line per event."""

    def __init__(self, *, shows_texts: bool = False) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S", shows_texts=shows_texts)

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        # Another formatter may have left a whole trace there.
        record.exc_text = None
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


def configure_logging(level: str, form: str, *, shows_texts: bool) -> None:
    """Send every log event to standard error in one form.

    Args:
        level: The least one that is logged.
        form: ``json`` or ``text``.
        shows_texts: Whether traces may repeat what requests said.
    """
    handler = logging.StreamHandler()
    formatter = JsonFormatter if form == "json" else TextFormatter
    handler.setFormatter(formatter(shows_texts=shows_texts))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("uvicorn.error").addFilter(_NoAbortNoise())
