"""API keys: which there are, and the guard before every route that computes.

A key is kept as its digest only, so that nothing that prints or logs settings can print a key.
"""

import hashlib
import hmac
import ipaddress
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from litestar.types import ASGIApp, Receive, Scope, Send

from service.errors import ServiceError, describe
from service.telemetry import note

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/version", "/schema"})
"""What tells of the server, and of no request. All below ``/schema`` is open too."""

_COMMENT = re.compile(r"(^|\s)#.*")


class ApiKeys:
    """The keys that are let in; none at all lets everybody in.

    Attributes:
        digests: SHA-256 of each.
        file: Whose keys are among them; empty if no file was read.
    """

    def __init__(self, digests: Iterable[bytes] = (), file: str = "") -> None:
        self.digests = tuple(dict.fromkeys(digests))
        self.file = file

    @classmethod
    def of(cls, keys: Iterable[str]) -> "ApiKeys":
        """Return what lets these keys in; blank ones are passed over.

        Raises:
            ValueError: There is no key, or one holds what a header cannot carry.
        """
        named = [key for key in (each.strip() for each in keys) if key]
        if not named:
            raise ValueError("there is no key in it")
        if not all(key.isascii() and key.isprintable() and " " not in key for key in named):
            raise ValueError("a key may hold printable ASCII characters only, and no blank")
        return cls(_digest(key.encode()) for key in named)

    def admits(self, token: bytes) -> bool:
        """Tell whether a token is one of the keys, in a time that says nothing about which or how nearly."""
        digest = _digest(token)
        return any([hmac.compare_digest(digest, each) for each in self.digests])  # noqa: C419 - looks at all

    def __bool__(self) -> bool:
        return bool(self.digests)

    def __str__(self) -> str:
        num = len(self.digests)
        return f"{num} key{'s' * (num > 1)}" if num else ""


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def read_keys(path: Path) -> ApiKeys:
    """Return the keys of a file: one a line, and comments from a ``#`` on that no key runs into.

    Raises:
        ValueError: It cannot be read, or holds no key.
    """
    try:
        # Editors on Windows begin a file with a mark that is no part of the first key.
        lines = path.read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot be read: {type(error).__name__}") from None
    return ApiKeys.of(_COMMENT.sub("", line) for line in lines)


def is_readable_by_all(path: Path) -> bool:
    """Tell whether every user of the machine can read a file."""
    return bool(path.stat().st_mode & stat.S_IROTH)


def is_loopback(host: str) -> bool:
    """Tell whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class KeyGuard:
    """Lets a request pass if it names a key, before anything else is looked at, its body included."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        """Stand before an app.

        Args:
            app: What is guarded.
            keys: At least one.
        """
        assert keys
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http" or _is_open(scope["path"]) or self._keys.admits(_token(scope)):
            await self._app(scope, receive, send)
            return
        refusal = ServiceError("invalid_api_key", "send a valid API key: `Authorization: Bearer KEY`")
        status, _, envelope = describe(refusal)
        note(scope, error_code=refusal.code)
        body = msgspec.json.encode(envelope)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"www-authenticate", b"Bearer"),
            (b"vary", b"accept"),
        ]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith("/schema/")


def _token(scope: Scope) -> bytes:
    """Return what stands behind ``Bearer``; empty, which is no key, if that is not stated exactly once."""
    stated = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(stated) != 1:
        return b""
    scheme, _, token = stated[0].partition(b" ")
    return token.strip(b" \t") if scheme.lower() == b"bearer" else b""
