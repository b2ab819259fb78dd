"""Batches of one row, which nearly all are, taken with as little work as can be."""

from dataclasses import dataclass
from typing import Any

from logitwire import ipc
from logitwire.columns import Form
from logitwire.errors import IncompleteStreamError
from logitwire.http import Source
from logitwire.rows import Places, Rows

MAX_KNOWN = 4096
"""Kinds of batches that are remembered; no real stream has more."""


@dataclass(frozen=True, slots=True)
class _Single:
    """What all batches of one row have in common whose metadata are the same.

    Attributes:
        form: How their small columns are read.
        size: Of the frame, the metadata and the small columns, in bytes.
        choice: The place of the choice among the values.
    """

    form: Form
    size: int
    choice: int


@dataclass(frozen=True, slots=True)
class TakenRow:
    """A row whose small columns were taken, and whose logits come next."""

    single: _Single
    values: tuple[Any, ...]
    place: Rows


class Singles:
    """Takes batches of one row whose metadata came before.

    A row just received has pushed everything else out of the processor's caches, so what costs is how much
    code and data the next one touches. So all that can be is done once for each metadata, and the small
    columns are read when the stream is over.
    """

    def __init__(self, places: Places | None) -> None:
        self._places = places
        self._known: dict[bytes, _Single] = {}
        self._rows: list[tuple[Form, tuple[Any, ...]]] = []

    def learn(self, metadata: bytes, head: ipc.Head, form: Form | None) -> None:
        """Remember a batch that was read the long way."""
        if form is None or self._places is None or head.custom_metadata or len(self._known) >= MAX_KNOWN:
            return
        at, length = head.buffers[-1]
        choice = form.index_of("choice")
        if choice is not None and at + length == head.body_length:
            self._known[metadata] = _Single(form, ipc.FRAME.size + len(metadata) + at, choice)

    def take(self, source: Source) -> TakenRow | None:
        """Take a row's small columns, if they are here and like some before; ``None`` takes nothing."""
        buffer, start, stop = source.here()
        if stop - start < ipc.FRAME.size:
            return None
        mark, length = ipc.FRAME.unpack_from(buffer, start)
        at = start + ipc.FRAME.size + length
        if mark != ipc.CONTINUATION or length <= 0 or at > stop:
            return None
        single = self._known.get(bytes(buffer[start + ipc.FRAME.size : at]))
        if single is None or single.size > stop - start:
            return None
        values = single.form.values.unpack_from(buffer, at)
        assert self._places is not None
        place = self._places.one(values[single.choice])
        source.skip(single.size)
        self._rows.append((single.form, values))
        return TakenRow(single, values, place)

    @staticmethod
    def columns_of(row: TakenRow) -> dict[str, list[Any]]:
        """Return the small columns of a row."""
        try:
            return row.single.form.row(row.values)
        except ValueError as error:
            raise IncompleteStreamError("a batch of the stream cannot be read") from error

    def move_to(self, columns: dict[str, list[Any]]) -> None:
        """Add the small columns of the rows taken since the last time to those of the table."""
        try:
            for form, values in self._rows:
                form.extend(columns, values)
        except ValueError as error:
            raise IncompleteStreamError("a batch of the stream cannot be read") from error
        self._rows.clear()
