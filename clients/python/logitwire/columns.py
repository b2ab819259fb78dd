"""The small columns of record batches: everything but the rows."""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from logitwire.errors import IncompleteStreamError
from logitwire.ipc import Head


@dataclass(frozen=True, slots=True)
class Column:
    """One of the small columns."""

    name: str
    kind: pa.DataType


class ColumnReader:
    """Reads the small columns of a stream's batches.

    Most batches have one row, and pyarrow's arrays would cost more than that. The head of such a batch says
    where its values are, and is the same again and again, so one :class:`struct.Struct` reads them all.
    """

    def __init__(self, columns: Sequence[Column]) -> None:
        """Prepare.

        Args:
            columns: In the order of the stream.
        """
        self.names = [each.name for each in columns]
        self._columns = columns
        self._forms: dict[Head, Form | None] = {}

    def form(self, head: Head) -> "Form | None":
        """Return how batches like one that was read are read, if it had one row of numbers and strings."""
        return self._forms.get(head)

    def read(self, head: Head, body: bytes) -> dict[str, list[Any]]:
        """Return the values of a batch, given its body up to the rows.

        Raises:
            IncompleteStreamError: The body does not hold what its head says.
        """
        try:
            if head.num_rows == 1:
                if head not in self._forms:
                    self._forms[head] = _form_of(self._columns, head)
                form = self._forms[head]
                if form is not None:
                    return form.row(form.values.unpack_from(body))
            values = self._read_arrays(head, body) if head.num_rows else {}
        except (StopIteration, struct.error, ValueError, IndexError, pa.ArrowException) as error:
            raise IncompleteStreamError("a batch of the stream cannot be read") from error
        if any(len(each) != head.num_rows for each in values.values()):
            raise IncompleteStreamError("a batch of the stream has columns of different lengths")
        return values

    def _read_arrays(self, head: Head, body: bytes) -> dict[str, list[Any]]:
        whole, buffers, nodes = pa.py_buffer(body), iter(head.buffers), iter(head.nodes)
        values = {}
        for each in self._columns:
            array = _array(each.kind, whole, buffers, nodes)
            # Unchecked offsets would be read wherever they point.
            array.validate(full=True)
            values[each.name] = array.to_pylist()
        return values


NUMBER, NULL, TEXT, BYTES = range(4)


@dataclass(frozen=True, slots=True)
class Form:
    """Where the values of one row are in the body of its batch.

    Attributes:
        values: All numbers and strings of the body, in their order.
        places: For each column its name, its first place among these, and what it is.
    """

    values: struct.Struct
    places: list[tuple[str, int, int]]

    def row(self, found: tuple[Any, ...]) -> dict[str, list[Any]]:
        """Return the one value of each column.

        Args:
            found: What ``values`` unpacked.
        """
        row: dict[str, list[Any]] = {}
        self.extend(row, found)
        return row

    def extend(self, columns: dict[str, list[Any]], found: tuple[Any, ...]) -> None:
        """Add the one value of each column to the lists of all rows.

        Raises:
            ValueError: A string is none.
        """
        for name, place, kind in self.places:
            value: Any = None
            if kind == NUMBER:
                value = found[place]
            elif kind != NULL:
                # Behind the two offsets stands the string.
                start, stop = found[place], found[place + 1]
                value = found[place + 2][start:stop]
                if start < 0 or len(value) != stop - start:
                    raise ValueError("a string lies outside of its column")
                value = value.decode() if kind == TEXT else value
            columns.setdefault(name, []).append(value)

    def index_of(self, name: str) -> int | None:
        """Return the place of a number among what ``values`` unpacks; ``None`` if it is null."""
        return next((place for own, place, kind in self.places if own == name and kind == NUMBER), None)


_NUMBERS = {pa.int32(): "i", pa.float32(): "f"}
_STRINGS = {pa.utf8(): TEXT, pa.binary(): BYTES}


def _form_of(columns: Sequence[Column], head: Head) -> Form | None:
    """Return how to read a batch of one row; ``None`` if it has columns of lists, or of another length."""
    form, end, num_values = "<", 0, 0
    places = []
    buffers, nodes = iter(head.buffers), iter(head.nodes)
    for column in columns:
        number, string = _NUMBERS.get(column.kind), _STRINGS.get(column.kind)
        if number is None and string is None:
            return None
        length, null_count = next(nodes)
        if length != 1:
            return None
        next(buffers)  # the validity bitmap
        at, _ = next(buffers)
        # Each buffer lies behind the one before; where they do not, there is no such format.
        form += f"{at - end}x{number or '2i'}"
        end = at + struct.calcsize(f"<{number or '2i'}")
        kind = NUMBER if string is None else string
        places.append((column.name, num_values, NULL if null_count else kind))
        num_values += 1 if string is None else 2
        if string is not None:
            at, length = next(buffers)
            form += f"{at - end}x{length}s"
            end = at + length
            num_values += 1
    return Form(struct.Struct(form), places)


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
    elif pa.types.is_string(kind) or pa.types.is_binary(kind):
        own = [next(buffers) for _ in range(3)]
    elif pa.types.is_primitive(kind):
        own = [next(buffers) for _ in range(2)]
    else:
        raise pa.ArrowNotImplementedError(f"the wire has no columns of {kind}")
    # The first buffer is the validity bitmap, which may be left out where nothing is null.
    slices = [body.slice(at, size) if size or place else None for place, (at, size) in enumerate(own)]
    return pa.Array.from_buffers(kind, length, slices, null_count, children=children)
