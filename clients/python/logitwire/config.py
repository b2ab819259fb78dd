"""What a client is told once: where the server is, and how patient to be."""

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

DEFAULT_BASE_URL = "http://127.0.0.1:8000"

CONNECT_TIMEOUT_S = 10.0
"""Seconds that opening a connection may take at most."""

MAX_IDLE = 16
"""Connections that a client keeps for its next calls at most."""


@dataclass(frozen=True, slots=True)
class Config:
    """How to talk to one server.

    Attributes:
        host: Name or number.
        port: Of TCP.
        netloc: Host and port, as a request names them.
        prefix: Path before those of the API.
        api_key: Sent as a bearer token, if given.
        timeout_s: Seconds to wait for the next bytes at most.
        max_retries: Tries after the first one at most.
        context: Of TLS; ``None`` speaks plain HTTP.
    """

    host: str
    port: int
    netloc: str
    prefix: str
    api_key: str | None
    timeout_s: float
    max_retries: int
    context: ssl.SSLContext | None

    @property
    def connect_timeout_s(self) -> float:
        """Return the seconds that opening a connection may take."""
        return min(self.timeout_s, CONNECT_TIMEOUT_S)


def load_config(
    base_url: str | None,
    api_key: str | None,
    *,
    timeout_s: float,
    max_retries: int,
    context: ssl.SSLContext | None,
    environ: Mapping[str, str] = os.environ,
) -> Config:
    """Return the configuration of a client.

    Args:
        base_url: Such as ``http://127.0.0.1:8000``; a trailing ``/v1`` is allowed. ``None`` takes
            LOGITWIRE_BASE_URL.
        api_key: Of the server; ``None`` takes LOGITWIRE_API_KEY, if that is set.
        timeout_s: Seconds to wait for the next bytes at most.
        max_retries: Tries after the first one at most.
        context: Of TLS; ``None`` trusts what the system trusts.
        environ: The environment.

    Raises:
        ValueError: The address is no http or https URL, or a number is out of its range.
    """
    url = base_url or environ.get("LOGITWIRE_BASE_URL") or DEFAULT_BASE_URL
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or parts.hostname is None:
        raise ValueError(f"not an http or https URL: {url!r}")
    if timeout_s <= 0 or max_retries < 0:
        raise ValueError("timeout_s must be above 0, and max_retries 0 or more")
    is_tls = parts.scheme == "https"
    return Config(
        host=parts.hostname,
        port=parts.port or (443 if is_tls else 80),
        netloc=parts.netloc.rpartition("@")[2],
        prefix=parts.path.rstrip("/").removesuffix("/v1"),
        api_key=api_key or environ.get("LOGITWIRE_API_KEY") or None,
        timeout_s=timeout_s,
        max_retries=max_retries,
        context=(context or ssl.create_default_context()) if is_tls else None,
    )
