"""When to ask again, and how long to wait before: as OpenAI's SDKs do.

A server's ``x-should-retry`` decides; without it 408, 409, 429 and 5xx are tried again, and so is a request
that got no byte of an answer. An answer that broke off is not: the caller may have rows of it.
"""

import random
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime

from logitwire.errors import APIConnectionError, APIError, LogitwireError

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 8.0

MAX_RETRY_AFTER_S = 60.0
"""A server that wants a longer pause is not asked again; its error is raised, with its headers."""


def retry_delay_s(error: LogitwireError, num_retries: int, max_retries: int) -> float | None:
    """Return for how long to wait before another try, or ``None`` if there is to be none.

    Args:
        error: What the last try raised.
        num_retries: How many retries there were.
        max_retries: How many there may be.
    """
    if num_retries >= max_retries or not _is_worth_it(error):
        return None
    if isinstance(error, APIError):
        asked_s = retry_after_s(error.headers, time.time())
        if asked_s is not None:
            return asked_s if asked_s <= MAX_RETRY_AFTER_S else None
    delay_s = min(FIRST_DELAY_S * 2.0**num_retries, MAX_DELAY_S)
    # Up to a quarter less, so that clients that failed together do not come back together.
    return delay_s * (1 - 0.25 * random.random())  # noqa: S311 - no secret


def retry_after_s(headers: Mapping[str, str], now_s: float) -> float | None:
    """Return the pause that a server asks for: ``retry-after-ms``, or ``Retry-After`` of RFC 9110.

    Args:
        headers: Names in lower case.
        now_s: Seconds since the epoch; a pause may be given as a date.
    """
    try:
        milliseconds = float(headers["retry-after-ms"])
        if 0 <= milliseconds < float("inf"):
            return milliseconds / 1000
    except (KeyError, ValueError):
        pass
    value = headers.get("retry-after", "").strip()
    try:
        seconds = float(value)
        return seconds if 0 <= seconds < float("inf") else None
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - now_s)
    except ValueError:
        return None


def _is_worth_it(error: LogitwireError) -> bool:
    if isinstance(error, APIConnectionError):
        return True
    if not isinstance(error, APIError) or error.status is None:
        return False
    said = error.headers.get("x-should-retry", "").lower()
    if said in ("true", "false"):
        return said == "true"
    return error.status in (408, 409, 429) or (error.status >= 500 and error.status != 507)
