"""Rows that are not one array: in pieces, or picked from others. Nothing is copied until it is asked for."""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray


@runtime_checkable
class SlicedRows(Protocol):
    """Anything of shape (T, V) whose slices are arrays: arrays, memory maps, and the classes here."""

    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102 - as numpy's

    @property
    def dtype(self) -> Any: ...  # noqa: D102 - as numpy's

    def __getitem__(self, key: Any, /) -> Any: ...


RowsLike: TypeAlias = SlicedRows | ArrayLike
"""What the functions of this package take as rows of logits."""


def as_rows(rows: RowsLike) -> SlicedRows:
    """Return rows that can be sliced; those that can be already are not touched.

    Raises:
        ValueError: They are not (T, V) or (V,), or V is 0.
    """
    sliced: SlicedRows = rows if isinstance(rows, SlicedRows) else np.asarray(rows)
    if len(sliced.shape) == 1:
        sliced = np.asarray(sliced)[None]
    if len(sliced.shape) != 2 or sliced.shape[1] == 0:
        raise ValueError(f"rows have shape (T, V), not {tuple(sliced.shape)}")
    return sliced


def shown(rows: SlicedRows | None) -> str:
    """Return what a representation says of rows: never their values."""
    return "no rows" if rows is None else f"rows {tuple(rows.shape)} {rows.dtype}"


class _View(ABC):
    """What both kinds of view share: they look like an array of shape (T, V)."""

    ndim = 2

    def __init__(self, num: int, width: int, dtype: DTypeLike) -> None:
        self.shape = (num, width)
        self.dtype = np.dtype(dtype)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any, /) -> NDArray[Any]:
        """Return rows by a number, a slice, or an array of numbers."""
        if isinstance(key, slice):
            return self._take(range(*key.indices(len(self))))
        places = np.arange(len(self))[key]
        return self._take([int(places)])[0] if places.ndim == 0 else self._take(places.tolist())

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError("these rows are in pieces; one array of them is a copy")
        return np.asarray(self[:], dtype)

    @abstractmethod
    def _take(self, places: Sequence[int]) -> NDArray[Any]:
        """Return rows by their numbers, (k, V)."""


class ChunkedRows(_View):
    """Rows (T, V) that lie in several arrays, such as the record batches of a file."""

    def __init__(
        self, load: Callable[[int], NDArray[Any]], lengths: Sequence[int], width: int, dtype: DTypeLike
    ) -> None:
        """Remember where the rows are.

        Args:
            load: Returns a chunk by its number, (its length, V).
            lengths: Rows of each chunk.
            width: V.
            dtype: Of the values.
        """
        self._load = load
        self._ends = list(accumulate(lengths))
        super().__init__(self._ends[-1] if self._ends else 0, width, dtype)

    def _take(self, places: Sequence[int]) -> NDArray[Any]:
        pieces = []
        at = 0
        while at < len(places):
            number = bisect_right(self._ends, places[at])
            start = self._ends[number - 1] if number else 0
            stop = at + 1
            # Rows that follow each other in one chunk are taken together.
            while stop < len(places) and places[stop] == places[stop - 1] + 1 < self._ends[number]:
                stop += 1
            first = places[at] - start
            pieces.append(self._load(number)[first : first + stop - at])
            at = stop
        if not pieces:
            return np.empty((0, self.shape[1]), self.dtype)
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


class PickedRows(_View):
    """Rows of others, by their numbers."""

    def __init__(self, rows: SlicedRows, places: Sequence[int] | NDArray[np.integer]) -> None:
        """Remember which.

        Args:
            rows: (T, V).
            places: Numbers of rows, in any order, each from 0 to T-1.

        Raises:
            ValueError: One is not.
        """
        self._rows = rows
        self._places = np.asarray(places, np.int64)
        if len(self._places) and not 0 <= self._places.min() <= self._places.max() < rows.shape[0]:
            raise ValueError(f"row {self._places.max()} is asked for, and there are {rows.shape[0]} rows")
        super().__init__(len(self._places), rows.shape[1], rows.dtype)

    def _take(self, places: Sequence[int]) -> NDArray[Any]:
        picked = self._places[places]
        if len(picked) and (np.diff(picked) == 1).all():
            return np.asarray(self._rows[int(picked[0]) : int(picked[-1]) + 1])
        return np.asarray(self._rows[picked])
