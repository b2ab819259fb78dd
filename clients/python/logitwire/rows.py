"""Where rows go: each choice's into one growing array, or each row into memory of its own."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from logitwire.errors import IncompleteStreamError

Rows = NDArray[np.floating]
"""(T, V) or (V,), float16 or float32."""

FIRST_CAPACITY = 64

MAX_FIRST_BYTES = 2**30
"""Of a choice's array before any row came, however many rows are announced."""


class Places(ABC):
    """Gives out memory for the rows of batches, in their order."""

    def __init__(self, width: int, dtype: np.dtype[Any]) -> None:
        """Prepare.

        Args:
            width: V, values in a row.
            dtype: Of a value.
        """
        self.width = width
        self.dtype = dtype
        self.row_bytes = width * dtype.itemsize

    @abstractmethod
    def next(self, choices: Sequence[int]) -> list[Rows]:
        """Return memory for the rows of a batch, given the choice of each: arrays (k, V), one behind another.

        Raises:
            IncompleteStreamError: There is no such choice.
        """

    @abstractmethod
    def one(self, choice: int) -> Rows:
        """Return memory for one row of a choice, an array (1, V); see :meth:`next`."""

    def parts(self) -> list[Rows] | None:
        """Return all rows of each choice, read-only (T, V), if they are kept."""
        return None


class Loose(Places):
    """Each row has memory of its own, and lives as long as somebody holds it."""

    def next(self, choices: Sequence[int]) -> list[Rows]:
        """Return one array (1, V) per row."""
        return [self.one(choice) for choice in choices]

    def one(self, choice: int) -> Rows:
        """Return an array (1, V)."""
        return np.empty((1, self.width), self.dtype)


class Kept(Places):
    """The rows of each choice lie in one array, however the choices interleave in the stream."""

    def __init__(self, width: int, dtype: np.dtype[Any], max_rows_of: Sequence[int | None]) -> None:
        """Prepare.

        Args:
            width: V, values in a row.
            dtype: Of a value.
            max_rows_of: For each choice how many rows may come, if that is known.
        """
        super().__init__(width, dtype)
        self._numbers = range(len(max_rows_of))
        self._of = [_Growing(width, dtype, max_rows) for max_rows in max_rows_of]

    def next(self, choices: Sequence[int]) -> list[Rows]:
        """Return one array per run of rows of one choice."""
        if not all(each in self._numbers for each in choices):
            raise IncompleteStreamError(f"not all rows are of choices 0 to {len(self._of) - 1}")
        # An array that grew between two runs of one batch would leave the first run behind.
        for choice, num in Counter(choices).items():
            self._of[choice].reserve(num)
        return [self._of[choice].next(len(list(run))) for choice, run in groupby(choices)]

    def one(self, choice: int) -> Rows:
        """Return the next row of the array of a choice."""
        if choice not in self._numbers:
            raise IncompleteStreamError(f"a row is of none of the choices 0 to {len(self._of) - 1}")
        return self._of[choice].next(1)

    def parts(self) -> list[Rows]:
        """Return all rows of each choice, read-only (T, V)."""
        return [each.view() for each in self._of]


class _Growing:
    """One array (T, V) that rows are received into."""

    def __init__(self, width: int, dtype: np.dtype[Any], max_rows: int | None) -> None:
        # Memory that no row reaches is never touched, so a large array costs nothing.
        most = max(1, MAX_FIRST_BYTES // max(1, width * dtype.itemsize))
        capacity = min(most, FIRST_CAPACITY if max_rows is None else max_rows)
        self._array = np.empty((capacity, width), dtype)
        self._num = 0

    def reserve(self, num: int) -> None:
        """Make room for ``num`` more rows; those that were given out must be filled."""
        end = self._num + num
        if end > len(self._array):
            larger = np.empty((max(2 * len(self._array), end), self._array.shape[1]), self._array.dtype)
            larger[: self._num] = self._array[: self._num]
            self._array = larger

    def next(self, num: int) -> Rows:
        """Return the memory of the next ``num`` rows."""
        self.reserve(num)
        end = self._num + num
        place = self._array[self._num : end]
        self._num = end
        return place

    def view(self) -> Rows:
        """Return the rows that were given out, read-only."""
        rows = self._array[: self._num]
        rows.flags.writeable = False
        return rows
