from typing import Any

import numpy as np
import pytest

from logitwire.views import ChunkedRows, PickedRows, as_rows

ROWS = np.arange(60, dtype=np.float16).reshape(12, 5)
LENGTHS = [1, 4, 0, 2, 5]


def chunked() -> ChunkedRows:
    ends = np.cumsum(LENGTHS)
    return ChunkedRows(lambda place: ROWS[ends[place] - LENGTHS[place] : ends[place]], LENGTHS, 5, np.float16)


KEYS: list[Any] = [
    0,
    -1,
    11,
    slice(None),
    slice(1, 5),
    slice(3, 9),
    slice(0, 0),
    slice(None, None, -2),
    np.array([7, 7, 0, 11]),
    [4, 5],
    ROWS[:, 0] > 20,
]


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_rows_in_pieces_index_like_one_array(key: Any) -> None:
    np.testing.assert_array_equal(chunked()[key], ROWS[key])
    picked = PickedRows(chunked(), np.arange(11, -1, -1))
    np.testing.assert_array_equal(picked[key], ROWS[::-1][key])


def test_rows_in_pieces_have_a_shape_and_become_one_array() -> None:
    rows = chunked()
    assert (rows.shape, rows.ndim, len(rows), rows.dtype) == ((12, 5), 2, 12, np.float16)
    np.testing.assert_array_equal(np.asarray(rows), ROWS)
    assert np.asarray(rows, np.float32).dtype == np.float32
    assert as_rows(rows) is rows
    with pytest.raises(ValueError, match="in pieces"):
        np.asarray(rows, copy=False)
    with pytest.raises(IndexError):
        rows[12]


def test_rows_that_follow_each_other_are_not_copied() -> None:
    assert np.shares_memory(chunked()[1:5], ROWS)
    assert np.shares_memory(PickedRows(ROWS, [3, 4, 5, 1])[:3], ROWS)


def test_no_rows_at_all_keep_their_width() -> None:
    assert ChunkedRows(lambda place: ROWS, [], 5, np.float16)[:].shape == (0, 5)
    assert PickedRows(ROWS, [])[:].shape == (0, 5)


def test_rows_that_are_not_there_cannot_be_picked() -> None:
    for places in ([12], [-1]):
        with pytest.raises(ValueError, match="there are 12 rows"):
            PickedRows(ROWS, places)
