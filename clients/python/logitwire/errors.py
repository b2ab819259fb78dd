"""Everything that the client raises.

LogitwireError
 ├─ APIError: the server refused the request, or failed it
 ├─ ConnectionFailedError: there was no answer
 └─ IncompleteStreamError: the answer ended before it was whole
"""

from typing import Any


class LogitwireError(Exception):
    """Base of all errors of this package."""


class APIError(LogitwireError):
    """The server's error envelope.

    Attributes:
        status: HTTP status; ``None`` if the failure came in the middle of a stream.
        code: The closed vocabulary of the wire, such as ``invalid_value`` or ``queue_full``.
        param: Path of the field at fault, such as ``messages[2].content``.
        request_id: Names the request in the server's log.
    """

    def __init__(self, status: int | None, error: dict[str, Any], request_id: str | None) -> None:
        super().__init__(error.get("message", "the server gave no message"))
        self.status = status
        self.code: str | None = error.get("code")
        self.param: str | None = error.get("param")
        self.request_id = request_id


class ConnectionFailedError(LogitwireError):
    """The server could not be reached, or did not answer in time."""


class IncompleteStreamError(LogitwireError):
    """The stream broke off, lacks its end record, or holds another number of rows than that says."""
