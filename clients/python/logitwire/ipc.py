"""The metadata of Arrow's IPC messages, read from their flatbuffers.

Sources: Arrow Columnar Format, "Serialization and Interprocess Communication"; FlatBuffers, "Internals".
"""

import struct
from dataclasses import dataclass
from functools import lru_cache

from logitwire.errors import IncompleteStreamError

CONTINUATION = 0xFFFFFFFF
SCHEMA, RECORD_BATCH = 1, 3

CACHED_HEAD_BYTES = 4096
"""Heads up to this size are parsed once: those of single rows are the same again and again."""


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """What the metadata of an IPC message says of its body. Equal ones may be one object."""

    kind: int
    body_length: int
    num_rows: int
    nodes: list[tuple[int, int]]
    buffers: list[tuple[int, int]]
    is_compressed: bool
    custom_metadata: dict[bytes, bytes]


def framed(metadata: bytes) -> bytes:
    """Return metadata with its frame, as pyarrow reads it."""
    return struct.pack("<Ii", CONTINUATION, len(metadata)) + metadata


def parse(metadata: bytes) -> Head:
    """Return the parts of Arrow's ``Message`` and ``RecordBatch`` tables that reading needs.

    Raises:
        IncompleteStreamError: It is no such message.
    """
    return _parse_again(metadata) if len(metadata) <= CACHED_HEAD_BYTES else _parse(metadata)


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
        length = self._read("<I", at)
        if length > len(self._data):
            raise struct.error("a vector is longer than its message")
        return at + 4, length

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


def _parse(metadata: bytes) -> Head:
    """Return the parts of Arrow's ``Message`` and ``RecordBatch`` tables that reading needs."""
    try:
        message = _FlatTable(metadata, struct.unpack_from("<I", metadata)[0])
        kind = message.integer(1, "<B")
        batch = message.table(2) if kind == RECORD_BATCH else None
        head = Head(
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
    if head.body_length < 0 or head.num_rows < 0 or any(min(each) < 0 for each in head.buffers):
        raise IncompleteStreamError("a message of the stream has less than nothing")
    return head


_parse_again = lru_cache(1024)(_parse)
