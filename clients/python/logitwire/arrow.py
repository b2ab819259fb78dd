"""The Arrow stream of an answer, read so that rows land where they stay.

``pyarrow`` would read each batch into memory of its own, and one (T, V) array would then need a copy. So
this module reads the IPC framing itself (Arrow Columnar Format, "Serialization and Interprocess
Communication") and receives every row directly into the next place of one array. Small columns are left to
pyarrow.
"""

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from logitwire.errors import APIError, IncompleteStreamError

MEDIA_TYPE = "application/vnd.apache.arrow.stream"

RESPONSE_KEY = b"logitwire.response"
END_KEY = b"logitwire.end"
ERROR_KEY = b"logitwire.error"

CONTINUATION = 0xFFFFFFFF
SCHEMA, RECORD_BATCH = 1, 3
FIRST_CAPACITY = 64

CACHED_HEAD_BYTES = 4096
"""Heads up to this size are parsed once: those of single rows are the same again and again."""

ReadInto = Callable[[memoryview], int]
"""Fills some of a buffer and returns how much; 0 at the end of the stream."""


@dataclass(slots=True)
class Table:
    """A received stream.

    Attributes:
        columns: The small columns, each as one list over all rows.
        logits: (T, V) float16 or float32; ``None`` if the stream has no such column, or if ``parts`` has it.
        parts: For each choice its rows, (T of the choice, V), read-only, if each was to get an array.
        response: What the schema says of the answer.
        end: The answer without rows.
    """

    columns: dict[str, list[Any]]
    logits: NDArray[np.floating] | None
    parts: list[NDArray[np.floating]] | None
    response: dict[str, Any]
    end: dict[str, Any]


def read_table(
    readinto: ReadInto,
    *,
    max_rows: int | None = None,
    max_rows_of: Sequence[int | None] | None = None,
    request_id: str | None = None,
) -> Table:
    """Receive a whole stream.

    Args:
        readinto: Where the bytes come from.
        max_rows: How many rows may come, if that is known: their array is then never enlarged.
        max_rows_of: The same for each choice. The rows of each then lie in an array of its own, however the
            choices interleave in the stream.
        request_id: For errors.

    Raises:
        IncompleteStreamError: The stream ended before its end record, or a row count differs.
        APIError: The server reported a failure in the stream.
    """
    messages = _messages(readinto)
    first = next(messages, None)
    if first is None or first.head.kind != SCHEMA:
        raise IncompleteStreamError("the stream does not begin with a schema")
    schema = pa.ipc.read_schema(pa.py_buffer(first.framed()))
    response = msgspec.json.decode((schema.metadata or {}).get(RESPONSE_KEY, b"{}"))
    small = [_Column.of(each.name, each.type) for each in schema if each.name != "logits"]
    columns: dict[str, list[Any]] = {each.name: [] for each in small}
    rows = _rows(schema, max_rows, max_rows_of)
    end: dict[str, Any] | None = None
    num_rows = 0
    for message in messages:
        custom_metadata = message.head.custom_metadata
        if ERROR_KEY in custom_metadata:
            envelope = msgspec.json.decode(custom_metadata[ERROR_KEY])
            raise APIError(None, envelope.get("error", {}), request_id)
        if END_KEY in custom_metadata:
            end = msgspec.json.decode(custom_metadata[END_KEY])
        num_rows += message.head.num_rows
        for name, values in message.read_body(schema, small, rows).items():
            columns[name] += values
    if end is None:
        raise IncompleteStreamError(f"the stream ended after {num_rows} rows, without an end record")
    if sum(end.get("rows", ())) != num_rows:
        raise IncompleteStreamError(f"{num_rows} rows came, but the end record says {end.get('rows')}")
    if isinstance(rows, _RowsOfChoices) and rows.counts() != end.get("rows"):
        raise IncompleteStreamError(f"{rows.counts()} rows came, but the end record says {end.get('rows')}")
    return Table(
        columns=columns,
        logits=rows.view() if isinstance(rows, _Rows) else None,
        parts=rows.views() if isinstance(rows, _RowsOfChoices) else None,
        response=response,
        end=end,
    )


@dataclass(frozen=True, slots=True)
class _Column:
    """One of the small columns.

    Attributes:
        form: Of a value, if it is a number.
        is_text: Whether it is UTF-8.
        is_binary: Whether it is bytes.
    """

    name: str
    kind: pa.DataType
    form: struct.Struct | None
    is_text: bool
    is_binary: bool

    @classmethod
    def of(cls, name: str, kind: pa.DataType) -> "_Column":
        """Return the column of a field."""
        return cls(name, kind, _FORMS.get(kind), kind == pa.utf8(), kind == pa.binary())

    def cell(
        self, body: bytearray, buffers: Iterator[tuple[int, int]], nodes: Iterator[tuple[int, int]]
    ) -> Any:
        """Return the only value in a body of one row; pyarrow's arrays would cost more than the row."""
        if self.form is None and not self.is_text and not self.is_binary:
            return _array(self.kind, pa.py_buffer(body), buffers, nodes).to_pylist()[0]
        _, null_count = next(nodes)
        next(buffers)  # the validity bitmap
        at, _ = next(buffers)
        if self.form is not None:
            return None if null_count else self.form.unpack_from(body, at)[0]
        values_at, _ = next(buffers)
        if null_count:
            return None
        start, stop = _OFFSETS.unpack_from(body, at)
        value = bytes(body[values_at + start : values_at + stop])
        return value.decode() if self.is_text else value


_FORMS = {pa.int32(): struct.Struct("<i"), pa.float32(): struct.Struct("<f")}
_OFFSETS = struct.Struct("<2i")


class _Rows:
    """One growing (T, V) array that rows are received into."""

    def __init__(self, kind: Any, max_rows: int | None) -> None:
        dtype = np.dtype("<f2") if kind.value_type == pa.float16() else np.dtype("<f4")
        self._width: int = kind.list_size
        # Memory that no row reaches is never touched, so a large array costs nothing.
        self._array = np.empty((max_rows or FIRST_CAPACITY, self._width), dtype)
        self._num = 0

    def next(self, num: int) -> memoryview:
        """Return the memory of the next ``num`` rows."""
        if self._num + num > len(self._array):
            larger = np.empty((max(2 * len(self._array), self._num + num), self._width), self._array.dtype)
            larger[: self._num] = self._array[: self._num]
            self._array = larger
        place = self._array[self._num : self._num + num]
        self._num += num
        return place.reshape(-1).view(np.uint8).data

    def places(self, num: int, columns: Mapping[str, list[Any]]) -> Iterator[memoryview]:
        """Give out the memory of a batch of ``num`` rows, whatever its other columns say."""
        yield self.next(num)

    def view(self) -> NDArray[np.floating]:
        """Return the rows received, read-only."""
        rows = self._array[: self._num]
        rows.flags.writeable = False
        return rows


class _RowsOfChoices:
    """One growing array per choice."""

    def __init__(self, kind: Any, max_rows_of: Sequence[int | None]) -> None:
        self._of = [_Rows(kind, max_rows) for max_rows in max_rows_of]

    def places(self, num: int, columns: Mapping[str, list[Any]]) -> Iterator[memoryview]:
        """Give out the memory of a batch of ``num`` rows, piece by piece in their order."""
        choices = columns.get("choice")
        if choices is None or not all(0 <= each < len(self._of) for each in choices):
            raise IncompleteStreamError(
                f"{num} rows came, and not all are of choices 0 to {len(self._of) - 1}"
            )
        for choice, run in groupby(choices):
            yield self._of[choice].next(len(list(run)))

    def counts(self) -> list[int]:
        """Return the number of rows of each choice."""
        return [len(each.view()) for each in self._of]

    def views(self) -> list[NDArray[np.floating]]:
        """Return the rows of each choice, read-only."""
        return [each.view() for each in self._of]


def _rows(
    schema: pa.Schema, max_rows: int | None, max_rows_of: Sequence[int | None] | None
) -> _Rows | _RowsOfChoices | None:
    """Return where the rows of a stream go, if it has some."""
    if "logits" not in schema.names:
        return None
    if schema.names[-1] != "logits":
        raise IncompleteStreamError("the logits are not the last column")
    kind = schema.field("logits").type
    return _Rows(kind, max_rows) if max_rows_of is None else _RowsOfChoices(kind, max_rows_of)


@dataclass(frozen=True, slots=True)
class _Head:
    """What the metadata of an IPC message says of its body."""

    kind: int
    body_length: int
    num_rows: int
    nodes: list[tuple[int, int]]
    buffers: list[tuple[int, int]]
    is_compressed: bool
    custom_metadata: dict[bytes, bytes]


@dataclass(slots=True)
class _Message:
    """One IPC message whose body is still in the stream."""

    metadata: bytes
    head: _Head
    fill: Callable[[memoryview], None]
    is_read: bool = field(default=False)

    def framed(self) -> bytes:
        """Return the metadata with its frame, as pyarrow reads it."""
        return struct.pack("<Ii", CONTINUATION, len(self.metadata)) + self.metadata

    def read_body(
        self, schema: pa.Schema, small: Sequence[_Column], rows: _Rows | _RowsOfChoices | None
    ) -> dict[str, list[Any]]:
        """Receive the body: rows into their array, the other columns into lists."""
        self.is_read = True
        head = self.head
        if head.is_compressed:
            return self._read_compressed(schema, rows)
        has_rows = rows is not None and head.num_rows > 0
        logits_at, logits_length = head.buffers[-1] if has_rows else (head.body_length, 0)
        body = bytearray(logits_at)
        self.fill(memoryview(body))
        # The other columns come first in the body, and say whose rows follow.
        columns = self._columns(body, small)
        if rows is not None and has_rows:
            for place in rows.places(head.num_rows, columns):
                self.fill(place)
            self.fill(memoryview(bytearray(head.body_length - logits_at - logits_length)))
        return columns

    def _columns(self, body: bytearray, small: Sequence[_Column]) -> dict[str, list[Any]]:
        """Return the values of the small columns in a body."""
        head = self.head
        if not head.num_rows:
            return {}
        buffers, nodes = iter(head.buffers), iter(head.nodes)
        if head.num_rows == 1:
            return {each.name: [each.cell(body, buffers, nodes)] for each in small}
        whole = pa.py_buffer(body)
        return {each.name: _array(each.kind, whole, buffers, nodes).to_pylist() for each in small}

    def _read_compressed(
        self, schema: pa.Schema, rows: _Rows | _RowsOfChoices | None
    ) -> dict[str, list[Any]]:
        """Receive a body whose buffers are compressed; its rows are copied once, by their decompression."""
        body = bytearray(self.head.body_length)
        self.fill(memoryview(body))
        batch = pa.ipc.read_record_batch(pa.py_buffer(self.framed() + body), schema)
        columns = {name: batch[name].to_pylist() for name in schema.names if name != "logits"}
        if rows is not None and self.head.num_rows:
            received = batch["logits"].flatten().to_numpy().view(np.uint8).data
            for place in rows.places(self.head.num_rows, columns):
                place[:] = received[: len(place)]
                received = received[len(place) :]
        return columns


def _array(
    kind: pa.DataType,
    body: pa.Buffer,
    buffers: Iterator[tuple[int, int]],
    nodes: Iterator[tuple[int, int]],
) -> pa.Array:
    """Return the next column of a body."""
    length, null_count = next(nodes)
    children = []
    if pa.types.is_fixed_size_list(kind):
        own = [next(buffers)]
        children = [_array(kind.value_type, body, buffers, nodes)]
    elif pa.types.is_list(kind):
        own = [next(buffers) for _ in range(2)]
        children = [_array(kind.value_type, body, buffers, nodes)]
    else:
        own = [next(buffers) for _ in range(3 if pa.types.is_string(kind) or pa.types.is_binary(kind) else 2)]
    # The first buffer is the validity bitmap, which may be left out where nothing is null.
    slices = [body.slice(at, size) if size or place else None for place, (at, size) in enumerate(own)]
    return pa.Array.from_buffers(kind, length, slices, null_count, children=children)


def _messages(readinto: ReadInto) -> Iterator[_Message]:
    """Give out messages until the end-of-stream mark; each body must be read before the next."""

    def fill(buffer: memoryview) -> None:
        at = 0
        while at < len(buffer):
            got = readinto(buffer[at:])
            if not got:
                raise IncompleteStreamError("the stream broke off in the middle of a message")
            at += got

    while True:
        frame = bytearray(8)
        fill(memoryview(frame))
        mark, length = struct.unpack("<Ii", frame)
        if mark != CONTINUATION:
            raise IncompleteStreamError("this is no Arrow stream")
        if length == 0:
            # Only a closing chunk behind the mark shows that the server got to its own end.
            if readinto(memoryview(bytearray(1))):
                raise IncompleteStreamError("there are bytes behind the end of the stream")
            return
        metadata = bytearray(length)
        fill(memoryview(metadata))
        parse = _parse_again if length <= CACHED_HEAD_BYTES else _parse
        message = _Message(bytes(metadata), parse(bytes(metadata)), fill)
        yield message
        if not message.is_read and message.head.body_length:
            fill(memoryview(bytearray(message.head.body_length)))


class _FlatTable:
    """A table of a flatbuffer: fields by number, as FlatBuffers' "Internals" page describes them."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data = data
        self._at = at
        self._vtable = at - self._read("<i", at)
        self._vtable_size = self._read("<H", self._vtable)

    def _read(self, form: str, at: int) -> int:
        value: int = struct.unpack_from(form, self._data, at)[0]
        return value

    def _field(self, number: int) -> int | None:
        entry = 4 + 2 * number
        offset = self._read("<H", self._vtable + entry) if entry < self._vtable_size else 0
        return self._at + offset if offset else None

    def integer(self, number: int, form: str) -> int:
        """Return a number; 0 if it is left out."""
        at = self._field(number)
        return 0 if at is None else self._read(form, at)

    def table(self, number: int) -> "_FlatTable | None":
        """Return a nested table, if it is there."""
        at = self._field(number)
        return None if at is None else _FlatTable(self._data, at + self._read("<I", at))

    def _vector(self, number: int) -> tuple[int, int]:
        at = self._field(number)
        if at is None:
            return 0, 0
        at += self._read("<I", at)
        return at + 4, self._read("<I", at)

    def pairs(self, number: int) -> list[tuple[int, int]]:
        """Return a vector of structs of two int64."""
        at, length = self._vector(number)
        return [struct.unpack_from("<qq", self._data, at + 16 * place) for place in range(length)]

    def tables(self, number: int) -> list["_FlatTable"]:
        """Return a vector of tables."""
        at, length = self._vector(number)
        places = [at + 4 * place for place in range(length)]
        return [_FlatTable(self._data, place + self._read("<I", place)) for place in places]

    def string(self, number: int) -> bytes:
        """Return a string."""
        at, length = self._vector(number)
        return self._data[at : at + length]


def _parse(metadata: bytes) -> _Head:
    """Return the parts of Arrow's ``Message`` and ``RecordBatch`` tables that reading needs."""
    try:
        message = _FlatTable(metadata, struct.unpack_from("<I", metadata)[0])
        kind = message.integer(1, "<B")
        batch = message.table(2) if kind == RECORD_BATCH else None
        return _Head(
            kind=kind,
            body_length=message.integer(3, "<q"),
            num_rows=0 if batch is None else batch.integer(0, "<q"),
            nodes=[] if batch is None else batch.pairs(1),
            buffers=[] if batch is None else batch.pairs(2),
            is_compressed=batch is not None and batch.table(3) is not None,
            custom_metadata={each.string(0): each.string(1) for each in message.tables(4)},
        )
    except struct.error as error:
        raise IncompleteStreamError("a message of the stream cannot be read") from error


_parse_again = lru_cache(1024)(_parse)
