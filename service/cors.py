"""Cross-origin requests from web pages (Fetch standard, CORS protocol); only those origins that are set.

Litestar's own would stand behind the guard, where refusals of keys and unknown paths got no headers, and it
replaces ``Vary``.
"""

import re
from typing import Any

from litestar.types import ASGIApp, Message, Receive, Send

ANY = "*"

MAX_AGE_S = 600
"""For which a browser need not ask again."""

EXPOSED = b"x-request-id, retry-after, x-should-retry, www-authenticate"

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/,*?#]+")
_HEADER_NAMES = re.compile(rb"[A-Za-z0-9_, -]{1,2000}")


def parse_origins(text: str) -> frozenset[str]:
    """Return the origins of a list with commas.

    Raises:
        ValueError: One is neither ``*`` nor an origin such as ``https://example.org``.
    """
    origins = [each for each in (part.strip() for part in text.split(",")) if each]
    for origin in origins:
        if origin != ANY and not _ORIGIN.fullmatch(origin):
            raise ValueError(f"{origin!r} is neither * nor an origin such as https://example.org")
    return frozenset(origins)


class Cors:
    """Answers preflights, which bring no key, and lets pages of the allowed origins read all answers."""

    def __init__(self, app: ASGIApp, origins: frozenset[str]) -> None:
        """Stand before an app.

        Args:
            app: What answers all else.
            origins: At least one; ``*`` is all.
        """
        self._app = app
        self._allows_any = ANY in origins
        self._origins = {each.encode() for each in origins}

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        allowing = self._allowing(headers.get(b"origin"))
        wanted = headers.get(b"access-control-request-method")
        if scope["method"] == "OPTIONS" and wanted is not None and len(allowing) > 1:
            names = headers.get(b"access-control-request-headers", b"")
            if _HEADER_NAMES.fullmatch(names):
                # A wildcard would not cover Authorization.
                allowing.append((b"access-control-allow-headers", names))
            allowing += [
                (b"access-control-allow-methods", b"GET, POST"),
                (b"access-control-max-age", str(MAX_AGE_S).encode()),
            ]
            await send({"type": "http.response.start", "status": 204, "headers": allowing})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return

        async def send_allowing(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *allowing]
            await send(message)

        await self._app(scope, receive, send_allowing)

    def _allowing(self, origin: bytes | None) -> list[tuple[bytes, bytes]]:
        """Return the headers that let a page of an origin read the answer."""
        if self._allows_any:
            return [
                (b"access-control-allow-origin", b"*"),
                (b"access-control-expose-headers", EXPOSED),
            ]
        # Said in any case, for caches between us and several pages.
        varying = [(b"vary", b"origin")]
        if origin is None or origin not in self._origins:
            return varying
        return [
            *varying,
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", EXPOSED),
        ]
