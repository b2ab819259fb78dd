"""Rows brought in block by block, as their softmax needs them, into memory that is used again."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from logitwire.views import SlicedRows

BLOCK_VALUES = 2**17
"""Values per block, or one row if that is longer: its few arrays then fit the processor's cache."""


class Side:
    """One set of rows."""

    def __init__(
        self, rows: SlicedRows, name: str, temperature: float, dtype: np.dtype[Any] | None = None
    ) -> None:
        """Take the memory for one block.

        Args:
            rows: (T, V) logits.
            name: Of the rows, for errors.
            temperature: Divides them.
            dtype: What to compute in; by default as :func:`working_dtype` has it.

        Raises:
            ValueError: The temperature is not above 0 and finite.
        """
        if not (temperature > 0 and math.isfinite(temperature)):
            raise ValueError(f"temperature must be above 0 and finite, not {temperature}")
        self._rows = rows
        self._name = name
        self.num, self.width = rows.shape
        self.step = max(1, min(BLOCK_VALUES // self.width, self.num))
        self._dtype = dtype or working_dtype(rows)
        self._temperature = max(temperature, float(np.finfo(self._dtype).tiny))
        self._shifted = np.empty((self.step, self.width), self._dtype)
        self._weights = np.empty_like(self._shifted)

    def load(self, part: slice) -> tuple[NDArray[np.floating], NDArray[np.floating], NDArray[np.float64]]:
        """Bring in k rows.

        Raises:
            ValueError: A row is no distribution.

        Returns:
            Their logits over the temperature, less each row's maximum, (k, V); the exponentials of those,
            (k, V); and the sums of these, float64 (k, 1). The first two are overwritten by the next call,
            and the caller may do so as well.
        """
        block = np.asarray(self._rows[part])
        shifted, weights = self._shifted[: len(block)], self._weights[: len(block)]
        if block.dtype == np.float16 and self._dtype == np.float32:
            widen(block, shifted)
        else:
            np.copyto(shifted, block, casting="same_kind")
        highest = shifted.max(axis=-1, keepdims=True)
        if not np.isfinite(highest).all():
            place = part.start + int(np.argmin(np.isfinite(highest)))
            raise ValueError(f"row {place} of {self._name} holds NaN or +inf, or nothing but -inf")
        with np.errstate(all="ignore"):
            np.subtract(shifted, highest, out=shifted)
            if self._temperature != 1:
                np.divide(shifted, self._temperature, out=shifted)
            np.exp(shifted, out=weights)
        return shifted, weights, sums(weights)


def parts(side: Side) -> Iterator[slice]:
    """Give out which rows are the next block, until there are no more."""
    for start in range(0, side.num, side.step):
        yield slice(start, min(start + side.step, side.num))


def sums(values: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return the sum of each row, float64 (k, 1)."""
    found: NDArray[np.float64] = values.sum(axis=-1, keepdims=True, dtype=np.float64)
    return found


def working_dtype(rows: SlicedRows) -> np.dtype[Any]:
    """Return what rows are computed in: float32 if that holds their values, else float64."""
    narrow = (np.dtype(np.float16), np.dtype(np.float32))
    return np.dtype(np.float32) if rows.dtype in narrow else np.dtype(np.float64)


def widen(halves: NDArray[np.float16], out: NDArray[np.float32]) -> None:
    """Write float16 values as float32, bit by bit what a cast gives, and three times as fast as numpy's.

    A half float is sign, 5 bits of exponent biased by 15, 10 of fraction (IEEE 754-2019, 3.6). Shifted to
    the places that float32 has for them, the exponent is too small by 127 - 15 = 112. What is not finite
    comes out as 65536 or more, and is cast the slow way.
    """
    bits = out.view(np.int32)
    np.copyto(bits, halves.view(np.int16))  # repeats the sign
    np.left_shift(bits, 13, out=bits)
    np.bitwise_and(bits, np.int32(-0x70000001), out=bits)  # leaves one sign, exponent and fraction
    np.multiply(out, np.float32(2.0**112), out=out)
    if out.max() >= 65536 or out.min() <= -65536:
        np.copyto(out, halves)
