"""The Arrow stream of an answer, read so that rows land where they stay.

``pyarrow`` would read each batch into memory of its own, and one (T, V) array would then need a copy. So
this module reads the IPC framing itself (Arrow Columnar Format, "Serialization and Interprocess
Communication") and receives every row directly into its place. Small columns are left to pyarrow where there
is more than one row. Like :mod:`logitwire.http` it knows no I/O.
"""

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from logitwire import ipc
from logitwire.columns import Column, ColumnReader
from logitwire.errors import IncompleteStreamError, api_error
from logitwire.http import Receiving, Source
from logitwire.rows import Kept, Loose, Places, Rows
from logitwire.singles import Singles

MEDIA_TYPE = "application/vnd.apache.arrow.stream"

RESPONSE_KEY = b"logitwire.response"
END_KEY = b"logitwire.end"
ERROR_KEY = b"logitwire.error"

MAX_BYTES = 2**31
"""Of one message without its rows; nothing real is as large."""

FIRST_BYTES = 2**20

MAX_PADDING = 64

_NOTHING = memoryview(b"")

ReadInto = Callable[[memoryview], int]
"""Fills some of a buffer and returns how much; 0 at the end of the stream."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows that came together.

    Attributes:
        columns: The small columns, one value per row.
        places: Arrays (k, V) that hold the rows, one behind another; ``None`` without a column of rows.
        schema: Of the stream, with its metadata.
    """

    columns: dict[str, list[Any]]
    places: list[Rows] | None
    schema: pa.Schema | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """A received stream.

    Attributes:
        schema: Of the stream, with its metadata.
        columns: The small columns, each as one list over all rows.
        parts: For each choice its rows, (T of the choice, V), read-only; ``None`` if the stream has no such
            column, or if the rows were not kept.
        response: What the schema says of the answer.
        end: The answer without rows.
    """

    schema: pa.Schema
    columns: dict[str, list[Any]]
    parts: list[Rows] | None
    response: dict[str, Any]
    end: dict[str, Any]

    @property
    def logits(self) -> Rows | None:
        """Return the rows of the only choice, (T, V); ``None`` if there are several."""
        return self.parts[0] if self.parts is not None and len(self.parts) == 1 else None


Reading = Generator[memoryview | Batch, int | None, Table]
"""Yields buffers, as :data:`logitwire.http.Receiving` does, and batches as soon as they are there."""


def read_stream(
    source: Source,
    max_rows_of: Sequence[int | None],
    *,
    keeps: bool = True,
    gives: bool = True,
    request_id: str | None = None,
) -> Reading:
    """Receive a whole stream.

    Args:
        source: Where the bytes come from.
        max_rows_of: For each choice how many rows may come, if that is known: its array is then not enlarged.
        keeps: Whether the rows are kept for the table.
        gives: Whether batches are yielded.
        request_id: For errors.

    Raises:
        IncompleteStreamError: The stream ended before its end record, or a row count differs.
        APIError: The server reported a failure in the stream.
    """
    schema, response = yield from _opening(source)
    reader = ColumnReader([Column(each.name, each.type) for each in schema if each.name != "logits"])
    columns: dict[str, list[Any]] = {name: [] for name in reader.names}
    places = _places(schema, max_rows_of if keeps else None)
    singles = Singles(places)
    end: dict[str, Any] | None = None
    while True:
        row = singles.take(source)
        if row is not None:
            yield from _row(source, row.place)
            if gives:
                yield Batch(singles.columns_of(row), [row.place], schema)
            continue
        message = yield from _message(source)
        if message is None:
            break
        end = _record(message.head, request_id) or end
        if message.head.is_compressed:
            batch = yield from _compressed(source, message, schema, places)
        else:
            batch = yield from _plain(source, message.head, reader, places)
            singles.learn(message.metadata, message.head, reader.form(message.head))
        if message.head.num_rows:
            singles.move_to(columns)
            for name, values in batch.columns.items():
                columns[name] += values
            if gives:
                yield Batch(batch.columns, batch.places, schema)
    singles.move_to(columns)
    # Only a closing chunk behind the mark shows that the server got to its own end.
    if (yield from source.fill(memoryview(bytearray(1)))):
        raise IncompleteStreamError("there are bytes behind the end of the stream")
    end = _checked(end, columns["choice"])
    parts = None if places is None else places.parts()
    return Table(schema=schema, columns=columns, parts=parts, response=response, end=end)


def read_table(
    readinto: ReadInto,
    *,
    max_rows: int | None = None,
    max_rows_of: Sequence[int | None] | None = None,
    request_id: str | None = None,
) -> Table:
    """Receive a whole stream from a function, such as a file's ``readinto``; see :func:`read_stream`."""
    reading = read_stream(
        _Function(), (max_rows,) if max_rows_of is None else max_rows_of, request_id=request_id
    )
    answer: int | None = None
    while True:
        try:
            item = reading.send(answer)
        except StopIteration as stop:
            table: Table = stop.value
            return table
        answer = readinto(item) if isinstance(item, memoryview) else None


class _Function:
    """A source that asks for nothing but bytes."""

    def take(self, size: int) -> None:
        return None

    def here(self) -> tuple[memoryview, int, int]:
        return _NOTHING, 0, 0

    def skip(self, size: int) -> None:
        raise AssertionError("nothing is here")

    def fill(self, view: memoryview) -> Receiving[int]:
        at = 0
        while at < len(view) and (got := (yield view[at:])):
            at += got
        return at


@dataclass(frozen=True, slots=True)
class _Message:
    """One IPC message whose body is still in the stream."""

    metadata: bytes
    head: ipc.Head


def _opening(source: Source) -> Receiving[tuple[pa.Schema, dict[str, Any]]]:
    """Receive the schema of a stream, and what it says of the answer."""
    first = yield from _message(source)
    if first is None or first.head.kind != ipc.SCHEMA:
        raise IncompleteStreamError("the stream does not begin with a schema")
    opened = _schema(first.metadata)
    yield from _bytes(source, first.head.body_length)
    return opened


def _message(source: Source) -> Receiving[_Message | None]:
    """Receive the metadata of the next message; ``None`` at the end-of-stream mark."""
    mark, length = ipc.FRAME.unpack(source.take(8) or (yield from _bytes(source, 8)))
    if mark != ipc.CONTINUATION or length < 0:
        raise IncompleteStreamError("this is no Arrow stream")
    if length == 0:
        return None
    metadata = source.take(length) or (yield from _bytes(source, length))
    return _Message(metadata, ipc.parse(metadata))


def _bytes(source: Source, size: int) -> Receiving[bytes]:
    if not 0 <= size <= MAX_BYTES:
        raise IncompleteStreamError(f"a message of the stream claims {size} bytes")
    received = bytearray(min(size, FIRST_BYTES))
    yield from _fill(source, memoryview(received))
    while len(received) < size:
        # A wrong length shall not take memory for more than comes.
        more = bytearray(min(size - len(received), len(received)))
        yield from _fill(source, memoryview(more))
        received += more
    return bytes(received)


def _fill(source: Source, view: memoryview) -> Receiving[None]:
    if len(view) and (yield from source.fill(view)) < len(view):
        raise IncompleteStreamError("the stream broke off in the middle of a message")


def _plain(source: Source, head: ipc.Head, reader: ColumnReader, places: Places | None) -> Receiving[Batch]:
    """Receive a body: rows into their places, the other columns into lists."""
    if places is None or not head.num_rows:
        return Batch(reader.read(head, (yield from _bytes(source, head.body_length))), None)
    at, length = head.buffers[-1] if head.buffers else (0, -1)
    rest = head.body_length - at - length
    if any(null_count for _, null_count in head.nodes[-2:]):
        raise IncompleteStreamError("a batch of the stream has logits that are null")
    if length != head.num_rows * places.row_bytes or not 0 <= rest < MAX_PADDING:
        raise IncompleteStreamError("a batch of the stream does not hold as many rows as it says")
    # The other columns come first in the body, and say whose rows follow.
    columns = reader.read(head, source.take(at) or (yield from _bytes(source, at)))
    given = places.next(columns["choice"])
    for place in given:
        yield from _row(source, place)
    if rest:
        yield from _bytes(source, rest)
    return Batch(columns, given)


def _compressed(
    source: Source, message: _Message, schema: pa.Schema, places: Places | None
) -> Receiving[Batch]:
    """Receive a body whose buffers are compressed; its rows are copied once, by their decompression."""
    body = yield from _bytes(source, message.head.body_length)
    try:
        batch = pa.ipc.read_record_batch(pa.py_buffer(ipc.framed(message.metadata) + body), schema)
        batch.validate(full=True)
        columns = {name: batch[name].to_pylist() for name in schema.names if name != "logits"}
    except (pa.ArrowException, ValueError, OSError) as error:
        raise IncompleteStreamError("a batch of the stream cannot be read") from error
    if places is None or not batch.num_rows:
        return Batch(columns, None)
    if batch["logits"].null_count or (values := batch["logits"].flatten()).null_count:
        raise IncompleteStreamError("a batch of the stream has logits that are null")
    given = places.next(columns["choice"])
    received = values.to_numpy().reshape(-1, places.width)
    for place in given:
        place[:] = received[: len(place)]
        received = received[len(place) :]
    return Batch(columns, given)


def _row(source: Source, place: Rows) -> Receiving[None]:
    """Receive rows into their place."""
    view = place.data.cast("B")
    if (yield from source.fill(view)) < len(view):
        raise IncompleteStreamError("the stream broke off in the middle of a row")


def _schema(metadata: bytes) -> tuple[pa.Schema, dict[str, Any]]:
    """Return the schema of a stream, and what it says of the answer."""
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(ipc.framed(metadata)))
        has_choices = schema.names.count("choice") == 1 and schema.field("choice").type == pa.int32()
    except (pa.ArrowException, ValueError, OSError) as error:
        raise IncompleteStreamError("the stream has no schema that can be read") from error
    if not has_choices:
        raise IncompleteStreamError("the stream does not say whose rows it holds")
    return schema, _object((schema.metadata or {}).get(RESPONSE_KEY, b"{}"))


def _record(head: ipc.Head, request_id: str | None) -> dict[str, Any] | None:
    """Return the end record, if the message is one.

    Raises:
        APIError: It is the record of a failure.
    """
    if ERROR_KEY in head.custom_metadata:
        raise api_error(None, head.custom_metadata[ERROR_KEY], {}, request_id)
    return _object(head.custom_metadata[END_KEY]) if END_KEY in head.custom_metadata else None


def _object(encoded: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(encoded, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise IncompleteStreamError("a record of the stream is no JSON object") from error


def _places(schema: pa.Schema, max_rows_of: Sequence[int | None] | None) -> Places | None:
    """Return where the rows of a stream go, if it has some; ``None`` for ``max_rows_of`` keeps none."""
    if "logits" not in schema.names:
        return None
    kind = schema.field("logits").type
    if (
        schema.names[-1] != "logits"
        or not pa.types.is_fixed_size_list(kind)
        or kind.list_size < 1
        or kind.value_type not in (pa.float16(), pa.float32())
    ):
        raise IncompleteStreamError("the logits are not the last column, or no rows of floats")
    dtype = np.dtype("<f2") if kind.value_type == pa.float16() else np.dtype("<f4")
    return Loose(kind.list_size, dtype) if max_rows_of is None else Kept(kind.list_size, dtype, max_rows_of)


def _checked(end: dict[str, Any] | None, choices: Sequence[int]) -> dict[str, Any]:
    """Return the end record, held against the rows that came."""
    if end is None:
        raise IncompleteStreamError(f"the stream ended after {len(choices)} rows, without an end record")
    counts = end.get("rows")
    if not isinstance(counts, list) or not all(isinstance(each, int) for each in counts):
        raise IncompleteStreamError("the end record does not say how many rows there are")
    came = Counter(choices)
    if came != Counter(dict(enumerate(counts))):
        raise IncompleteStreamError(f"{[*came.values()]} rows came, but the end record says {counts}")
    return end
