"""The small columns of a record batch: everything but the rows."""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from logitwire.errors import IncompleteStreamError
from logitwire.ipc import Head


@dataclass(frozen=True, slots=True)
class Column:
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
    def of(cls, name: str, kind: pa.DataType) -> "Column":
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


def read_columns(columns: Sequence[Column], head: Head, body: bytearray) -> dict[str, list[Any]]:
    """Return the values of the small columns in the body of a batch.

    Raises:
        IncompleteStreamError: The body does not hold what its head says.
    """
    if not head.num_rows:
        return {}
    buffers, nodes = iter(head.buffers), iter(head.nodes)
    try:
        if head.num_rows == 1:
            return {each.name: [each.cell(body, buffers, nodes)] for each in columns}
        whole = pa.py_buffer(body)
        values = {each.name: _array(each.kind, whole, buffers, nodes).to_pylist() for each in columns}
    except (StopIteration, struct.error, ValueError, IndexError, pa.ArrowException) as error:
        raise IncompleteStreamError("a batch of the stream cannot be read") from error
    if any(len(each) != head.num_rows for each in values.values()):
        raise IncompleteStreamError("a batch of the stream has columns of different lengths")
    return values


_FORMS = {pa.int32(): struct.Struct("<i"), pa.float32(): struct.Struct("<f")}
_OFFSETS = struct.Struct("<2i")


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
