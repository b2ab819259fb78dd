"""Clients that trust nothing: each tells a whole answer from a refusal, a failure and a cut.

They read the wire itself with the standard library and pyarrow, so that no client's care hides a short
answer.
"""

import contextlib
import http.client
import json
import time
from dataclasses import dataclass
from typing import Any, get_args
from urllib.parse import urlsplit

import pyarrow as pa

from schemas.arrow import END_KEY, ERROR_KEY, MEDIA_TYPE
from schemas.errors import ErrorCode

CODES = frozenset(get_args(ErrorCode))

ENDS = (http.client.IncompleteRead, http.client.BadStatusLine, ConnectionError, pa.ArrowInvalid, OSError)
"""How a reader learns that an answer was cut."""


class ViolationError(Exception):
    """An answer that the contract does not know."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request and how its client behaves.

    Attributes:
        kind: For the table.
        path: Of the route.
        body: As JSON, or as bytes.
        is_arrow: Whether the answer is to be an Arrow stream.
        leave_after: Bytes of the answer after which the client leaves; ``None`` reads all of it.
        stall_s: Seconds for which the client takes nothing, in the middle of the answer.
    """

    kind: str
    path: str
    body: dict[str, Any] | bytes
    is_arrow: bool = False
    leave_after: int | None = None
    stall_s: float = 0.0

    @property
    def is_stream(self) -> bool:
        """Tell whether it asks for events."""
        return not self.is_arrow and isinstance(self.body, dict) and bool(self.body.get("stream"))


def ask(url: str, asked: Ask, timeout_s: float = 120.0) -> str:
    """Send a request and read its answer; return how it ended.

    Returns:
        ``whole``, ``left`` (the client did), ``cut`` (the connection ended before the answer did),
        ``refused CODE`` (by its status) or ``failed CODE`` (in the middle of a stream).

    Raises:
        ViolationError: It hangs, or its answer is none of these, such as one that is short and looks whole.
    """
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=timeout_s)
    try:
        return _exchange(connection, asked)
    except TimeoutError:
        raise ViolationError(f"nothing came for {timeout_s:.0f} s") from None
    except ENDS:
        return "cut"
    finally:
        connection.close()


def _exchange(connection: http.client.HTTPConnection, asked: Ask) -> str:
    connection.connect()
    headers = {"content-type": "application/json"} | ({"accept": MEDIA_TYPE} if asked.is_arrow else {})
    body = asked.body if isinstance(asked.body, bytes) else json.dumps(asked.body).encode()
    # It may be refused before it is all there, and the refusal can still be read.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.request("POST", asked.path, body, headers)
    response = connection.getresponse()
    if response.status != 200:
        return _refusal(response)
    if asked.leave_after is not None:
        response.read(asked.leave_after)
        return "left"
    if asked.stall_s:
        response.read(1)
        time.sleep(asked.stall_s)
        response.read()
        return "whole"
    if asked.is_arrow:
        return _arrow(response)
    if asked.is_stream:
        return _events(response.read())
    return _whole(json.loads(response.read()))


def _refusal(response: http.client.HTTPResponse) -> str:
    text = response.read()
    code = _code(text)
    if response.status >= 500 and code not in ("queue_full", "shutting_down", "loading"):
        raise ViolationError(f"{response.status}: {text[:300]!r}")
    if response.status == 503 and not response.getheader("retry-after"):
        raise ViolationError("503 without Retry-After")
    return f"refused {code}"


def _code(envelope: bytes) -> str:
    try:
        error = json.loads(envelope)["error"]
        if set(error) == {"message", "type", "param", "code"} and error["code"] in CODES:
            return str(error["code"])
    except (ValueError, KeyError, TypeError):
        pass
    raise ViolationError(f"no envelope: {envelope[:300]!r}")


def _events(body: bytes) -> str:
    """Read server-sent events, all of which have come."""
    events = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]
    if not events:
        raise ViolationError("a stream without an event")
    if events[-1] != b"[DONE]":
        return f"failed {_code(events[-1])}"
    finishes: dict[int, str] = {}
    seen: set[int] = set()
    for event in events[:-1]:
        for choice in json.loads(event)["choices"]:
            seen.add(choice["index"])
            if choice["finish_reason"]:
                finishes[choice["index"]] = choice["finish_reason"]
    if not seen or seen != set(finishes):
        raise ViolationError(f"choices without an end: {seen - set(finishes)}")
    return "whole"


def _whole(answer: Any) -> str:
    """Look into a JSON answer: each choice has an end, and as many rows as tokens."""
    for choice in answer.get("choices", ()) if isinstance(answer, dict) else ():
        if not choice["finish_reason"]:
            raise ViolationError("a choice without an end")
        if "logits" in choice and len(choice["logits"]["data"]) != len(choice["token_ids"]):
            raise ViolationError("fewer rows than tokens")
    return "whole"


def _arrow(response: http.client.HTTPResponse) -> str:
    """Read an Arrow stream as any reader would, and count its rows."""
    num_rows, record = 0, None
    with pa.ipc.open_stream(response) as reader:
        while True:
            try:
                batch, metadata = reader.read_next_batch_with_custom_metadata()
            except StopIteration:
                break
            num_rows += batch.num_rows
            if metadata is not None and ERROR_KEY in metadata:
                return f"failed {_code(metadata[ERROR_KEY])}"
            if metadata is not None:
                record = json.loads(metadata[END_KEY])
    if record is None or sum(record["rows"]) != num_rows:
        raise ViolationError(f"a short table that reads well: {num_rows} rows")
    response.read()
    return "whole"
