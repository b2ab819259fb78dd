"""One request and its answer, without I/O: what threads and event loops share."""

from collections.abc import Generator
from typing import Any, Generic, TypeVar

import msgspec

from logitwire.arrow import MEDIA_TYPE, Batch, read_stream
from logitwire.calls import JsonCall, RowsCall
from logitwire.config import Config
from logitwire.errors import APIConnectionError, APITimeoutError, IncompleteStreamError, api_error
from logitwire.http import Body, BrokenAnswerError, Head, Incoming, Receiving, request_bytes

Result = TypeVar("Result")

Exchanging = Generator[memoryview | Batch, int | None, Result]
"""Yields buffers and batches, as :data:`logitwire.arrow.Reading` does, and returns a call's result."""

USER_AGENT = "logitwire-python/0.1.0"

MAX_ERROR_BYTES = 2**20
MAX_JSON_BYTES = 2**30


class Exchange(Generic[Result]):
    """One request, and the reading of its answer.

    Attributes:
        request: The bytes to send.
        head: Of the answer, as soon as it came.
    """

    def __init__(
        self,
        call: RowsCall[Result] | JsonCall[Result],
        config: Config,
        *,
        keeps: bool = True,
    ) -> None:
        """Prepare.

        Args:
            call: What to ask for.
            config: Names the server.
            keeps: Whether the result gets the rows.
        """
        self._call = call
        self._keeps = keeps
        self._incoming = Incoming()
        self._body: Body | None = None
        self.head: Head | None = None
        headers = {
            "accept": MEDIA_TYPE if isinstance(call, RowsCall) else "application/json",
            "accept-encoding": "identity",
            "content-type": "application/json",
            "user-agent": USER_AGENT,
        }
        if config.api_key is not None:
            headers["authorization"] = f"Bearer {config.api_key}"
        self.request = request_bytes(config.prefix + call.path, config.netloc, headers, call.body)

    @property
    def has_begun(self) -> bool:
        """Tell whether any byte of the answer came."""
        return self._incoming.has_begun

    @property
    def spare(self) -> memoryview:
        """Return where bytes may go that are received behind a buffer that is full."""
        return self._incoming.view

    @property
    def may_follow(self) -> bool:
        """Tell whether the connection may serve another request."""
        return self._body is not None and self._body.may_follow

    def answer(self) -> Exchanging[Result]:
        """Read the answer.

        Raises:
            APIError: The server refused or failed the request.
            APIConnectionError: The connection ended before any byte of the answer.
            IncompleteStreamError: The answer broke off, or is not what was asked for.
        """
        try:
            self.head = head = yield from self._incoming.head()
            self._body = body = Body(self._incoming, head)
            request_id = head.headers.get("x-request-id")
            if head.status != 200:
                raise api_error(head.status, (yield from _readable(body)), head.headers, request_id)
            call = self._call
            wanted = MEDIA_TYPE if isinstance(call, RowsCall) else "application/json"
            if head.media_type != wanted:
                raise IncompleteStreamError(f"the answer is {head.media_type or 'of no type'}, not {wanted}")
            if isinstance(call, RowsCall):
                table = yield from read_stream(
                    body, call.max_rows_of, keeps=self._keeps, request_id=request_id
                )
                return call.result(table)
            return call.result(_decoded((yield from body.read(MAX_JSON_BYTES))))
        except BrokenAnswerError as error:
            raise self.failure(error) from error

    def failure(self, cause: Exception) -> APIConnectionError | IncompleteStreamError:
        """Return what to raise for a connection that failed."""
        if self.has_begun:
            return IncompleteStreamError(f"the answer broke off: {cause or repr(cause)}")
        kind = APITimeoutError if isinstance(cause, TimeoutError) else APIConnectionError
        return kind(f"no answer: {cause or repr(cause)}")


def _readable(body: Body) -> Receiving[bytes]:
    """Receive the body of a refusal; one that breaks off is still a refusal."""
    try:
        return (yield from body.read(MAX_ERROR_BYTES))
    except BrokenAnswerError:
        return b""


def _decoded(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise IncompleteStreamError("the answer is no JSON") from error
