"""Everything that the client raises.

LogitwireError
 ├─ APIError: the server refused the request, or failed it
 │   ├─ BadRequestError: 400 and other 4xx; the request itself is at fault
 │   │   ├─ ContextLengthError: 413 with ``context_length_exceeded``
 │   │   └─ UnprocessableEntityError: 422; ``param`` names the field
 │   ├─ AuthenticationError: 401
 │   ├─ PermissionDeniedError: 403
 │   ├─ NotFoundError: 404
 │   ├─ RateLimitError: 429
 │   └─ ServerError: 5xx, or a failure in the middle of a stream
 │       └─ OverloadedError: 503; the queue is full, or the server is loading or shutting down
 ├─ APIConnectionError: there was no answer
 │   └─ APITimeoutError: not in time
 └─ IncompleteStreamError: the answer broke off, or is not what it says it is
"""

from collections.abc import Mapping
from typing import Any

import msgspec


class LogitwireError(Exception):
    """Base of all errors of this package."""


class APIError(LogitwireError):
    """The server's error envelope.

    Attributes:
        status: HTTP status; ``None`` if the failure came in the middle of a stream.
        code: The closed vocabulary of the wire, such as ``invalid_value`` or ``queue_full``.
        param: Path of the field at fault, such as ``messages[2].content``.
        type: Of the error, in OpenAI's words, such as ``invalid_request_error``.
        request_id: Names the request in the server's log.
        body: The answer as it came; a proxy's may be no envelope.
        headers: Of the answer, names in lower case; empty in the middle of a stream.
    """

    status: int | None = None
    code: str | None = None
    param: str | None = None
    type: str | None = None
    request_id: str | None = None
    body: bytes = b""
    headers: Mapping[str, str] = {}


class BadRequestError(APIError):
    """The request cannot succeed as it is."""


class ContextLengthError(BadRequestError):
    """The prompt, or the prompt and ``max_tokens``, exceed the model's context."""


class UnprocessableEntityError(BadRequestError):
    """A field has a wrong type, range or name."""


class AuthenticationError(APIError):
    """The API key is missing or wrong."""


class PermissionDeniedError(APIError):
    """The API key does not allow this."""


class NotFoundError(APIError):
    """There is no such model or route."""


class RateLimitError(APIError):
    """Too many requests."""


class ServerError(APIError):
    """The server failed the request."""


class OverloadedError(ServerError):
    """The server takes no more work now."""


class APIConnectionError(LogitwireError):
    """The server could not be reached, or gave no byte of an answer."""


class APITimeoutError(APIConnectionError):
    """The server did not answer in time."""


class IncompleteStreamError(LogitwireError):
    """The stream broke off, lacks its end record, or holds another number of rows than that says."""


BY_STATUS: dict[int, type[APIError]] = {
    401: AuthenticationError,
    403: PermissionDeniedError,
    404: NotFoundError,
    422: UnprocessableEntityError,
    429: RateLimitError,
    503: OverloadedError,
}


def api_error(
    status: int | None, body: bytes, headers: Mapping[str, str], request_id: str | None = None
) -> APIError:
    """Return the exception of an error envelope; a proxy may answer with something else.

    Args:
        status: HTTP status; ``None`` if the failure came in the middle of a stream.
        body: The envelope.
        headers: Of the answer, names in lower case.
        request_id: Names the request in the server's log.
    """
    detail = _detail(body)
    message = detail.get("message") or f"the server answered with status {status} and no message"
    error = _class_of(status, detail)(message)
    error.status, error.body, error.headers, error.request_id = status, body, headers, request_id
    error.code, error.param, error.type = (detail.get(name) for name in ("code", "param", "type"))
    return error


def _class_of(status: int | None, detail: Mapping[str, Any]) -> type[APIError]:
    if detail.get("code") == "context_length_exceeded":
        return ContextLengthError
    if status is None:
        return ServerError if detail.get("type") == "server_error" else APIError
    if status in BY_STATUS:
        return BY_STATUS[status]
    if status >= 500:
        return ServerError
    return BadRequestError if status >= 400 else APIError


def _detail(body: bytes) -> dict[str, Any]:
    try:
        detail = msgspec.json.decode(body)["error"]
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, IndexError, RecursionError):
        return {"message": body[:200].decode(errors="replace")}
    return detail if isinstance(detail, dict) else {"message": str(detail)}
