import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from logitwire import IterationTracker, RowFileError, jsd, tracker_file

V = 40


def rows(num: int, seed: int, dtype: Any = np.float16) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(num, V)).astype(dtype)


def add(tracker: IterationTracker, ids: list[int], seed: int = 0, **metadata: Any) -> Any:
    return tracker.add_tokens(ids, rows(len(ids), seed), metadata=metadata)


def assert_same(one: IterationTracker, other: IterationTracker) -> None:
    for name in ("threshold", "patience", "pairs", "base", "temperature", "keep_rows", "converged"):
        assert getattr(one, name) == getattr(other, name)
    np.testing.assert_array_equal(one.matrix(), other.matrix())
    np.testing.assert_array_equal(one.mean_jsd, other.mean_jsd)
    for mine, its in zip(one.iterations, other.iterations, strict=True):
        assert (mine.text, mine.token_ids, mine.tokens) == (its.text, its.token_ids, its.tokens)
        assert mine.metadata == its.metadata
        assert (mine.logits is None) == (its.logits is None)
        if mine.logits is not None:
            assert its.logits is not None
            np.testing.assert_array_equal(np.asarray(mine.logits), np.asarray(its.logits))
            assert mine.logits.dtype == its.logits.dtype
    for mine_, its_ in zip(one.comparisons, other.comparisons, strict=True):
        np.testing.assert_array_equal(mine_.alignment.a_positions, its_.alignment.a_positions)
        assert mine_.alignment.kinds == its_.alignment.kinds


def test_each_iteration_is_compared_with_the_one_before_it() -> None:
    tracker = IterationTracker()
    assert add(tracker, [1, 2, 3], 0) is None
    second = add(tracker, [1, 2, 4, 5], 1)
    np.testing.assert_array_equal(second.jsd, jsd(rows(3, 0), rows(4, 1)[:3]))
    assert second.mean == second.jsd.mean()
    add(tracker, [9], 2)
    assert tracker.mean_jsd.shape == (2,)
    matrix = tracker.matrix()
    assert matrix.shape == (2, 4)
    np.testing.assert_array_equal(matrix[0, :3], second.jsd)
    assert np.isnan(matrix[0, 3])
    assert np.isnan(matrix[1, 1:]).all()


def test_all_aligned_pairs_are_compared_if_asked_for() -> None:
    tracker = IterationTracker(pairs="all", base="e", temperature=2.0)
    add(tracker, [1, 2, 3, 4], 0)
    found = add(tracker, [1, 9, 8, 3, 4], 1)
    a, b = rows(4, 0), rows(5, 1)
    np.testing.assert_array_equal(found.jsd, jsd(a, b[[0, 1, 3, 4]], "e", temperature=2.0))
    assert found.alignment.kinds == ["same prefix"] * 2 + ["same token"] * 2


def test_results_with_the_usual_attributes_can_be_added() -> None:
    tracker = IterationTracker()
    result = SimpleNamespace(text="hi", token_ids=np.array([1, 2]), tokens=["h", "i"], logits=rows(2, 0))
    tracker.add(result, critique="short")
    (first,) = tracker.iterations
    assert (first.text, first.token_ids, first.tokens) == ("hi", [1, 2], ["h", "i"])
    assert first.metadata == {"critique": "short"}


def test_a_loop_has_converged_after_enough_small_steps_in_a_row() -> None:
    tracker = IterationTracker(threshold=0.01, patience=2)
    states = []
    for seed in (0, 0, 1, 1, 1, 2):
        add(tracker, [1, 2], seed)
        states.append(tracker.converged)
    assert states == [False, False, False, False, True, False]


def test_equal_empty_and_one_token_iterations_are_no_special_case() -> None:
    tracker = IterationTracker(patience=1)
    means = []
    for ids in ([1, 2], [1, 2], [], [], [7], [7]):
        add(tracker, ids, 0)
        means.append(None if not tracker.comparisons else tracker.comparisons[-1].mean)
    assert means[1] == means[5] == 0
    assert all(math.isnan(each) for each in means[2:5])
    assert tracker.converged
    empty = IterationTracker(patience=1)
    add(empty, [])
    add(empty, [])
    assert not empty.converged
    assert empty.matrix().shape == (1, 0)
    assert IterationTracker().matrix().shape == (0, 0)


def test_only_the_last_rows_are_held_unless_all_are_asked_for() -> None:
    for keep, held in (("last", [False, False, True]), ("all", [True, True, True])):
        tracker = IterationTracker(keep_rows=keep)
        for seed in range(3):
            add(tracker, [1, 2], seed)
        assert [each.logits is not None for each in tracker.iterations] == held


@pytest.mark.parametrize("keep", ["last", "all"])
@pytest.mark.parametrize("pairs", ["same prefix", "all"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_saved_tracker_comes_back_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: Any, pairs: Any, dtype: Any
) -> None:
    monkeypatch.setattr(tracker_file, "GROUP_BYTES", 3 * V * 2)
    tracker = IterationTracker(threshold=0.5, patience=3, pairs=pairs, base="e", keep_rows=keep)
    for seed, ids in enumerate(([1, 2, 3, 4, 5, 6, 7], [1, 2, 9, 4, 5], [], [3], [3, 4, 5, 6])):
        tracker.add_tokens(
            ids, rows(len(ids), seed, dtype), tokens=["é\n"] * len(ids), metadata={"n": [seed]}
        )
    path = tmp_path / "loop.parquet"
    tracker.save(path)
    loaded = IterationTracker.load(path)
    assert_same(loaded, tracker)
    assert list(tmp_path.iterdir()) == [path]


def test_a_loaded_tracker_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "loop.parquet"
    whole, resumed = IterationTracker(), IterationTracker()
    for seed in range(4):
        add(whole, [1, 2, 3], seed, number=seed)
        add(resumed, [1, 2, 3], seed, number=seed)
        # Its rows are read from the very file that is then replaced.
        resumed.save(path)
        resumed = IterationTracker.load(path)
    assert_same(resumed, whole)


def test_rows_in_parquet_are_half_floats_bit_by_bit(tmp_path: Path) -> None:
    every = np.arange(2**16, dtype=np.uint16).view(np.float16).reshape(-1, 64)
    finite = np.where(np.isfinite(every) | (every == -np.inf), every, 0)
    tracker = IterationTracker()
    tracker.add_tokens([1] * len(finite), finite)
    tracker.save(tmp_path / "x")
    column = pq.read_table(tmp_path / "x")["logits"]
    assert column.type == pa.list_(pa.float16(), 64)
    read = column.combine_chunks().flatten().to_numpy().reshape(-1, 64)
    np.testing.assert_array_equal(read.view(np.uint16), finite.view(np.uint16))


def test_without_rows_the_series_is_kept_and_nothing_can_be_compared_with_its_end(tmp_path: Path) -> None:
    tracker = IterationTracker()
    for seed in range(3):
        add(tracker, [1, 2], seed)
    tracker.save(tmp_path / "x", with_rows=False)
    assert "logits" not in pq.read_schema(tmp_path / "x").names
    loaded = IterationTracker.load(tmp_path / "x")
    np.testing.assert_array_equal(loaded.matrix(), tracker.matrix())
    with pytest.raises(ValueError, match="saved without rows"):
        add(loaded, [1], 0)
    assert len(loaded.iterations) == 3


def test_a_tracker_without_iterations_can_be_saved(tmp_path: Path) -> None:
    IterationTracker(threshold=0.3).save(tmp_path / "x")
    loaded = IterationTracker.load(tmp_path / "x")
    assert loaded.iterations == loaded.comparisons == []
    assert loaded.threshold == 0.3


def test_a_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    tracker = IterationTracker()
    add(tracker, [1, 2])
    tracker.save(path)
    before = path.read_bytes()

    class Torn:
        shape = (2, V)
        dtype = np.dtype(np.float16)

        def __getitem__(self, key: Any) -> Any:
            raise OSError("the disk is gone")

    broken = IterationTracker()
    broken.add_tokens([1, 2], Torn())
    with pytest.raises(OSError, match="the disk is gone"):
        broken.save(path)
    add(tracker, [1, 2], what=object())
    with pytest.raises(ValueError, match="cannot be saved as JSON"):
        tracker.save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_what_does_not_fit_together_is_refused_and_changes_nothing() -> None:
    tracker = IterationTracker()
    add(tracker, [1, 2])
    with pytest.raises(ValueError, match="3 token ids, 3 tokens and 2 rows"):
        tracker.add_tokens([1, 2, 3], rows(2, 0))
    with pytest.raises(ValueError, match="2 token ids, 1 tokens"):
        tracker.add_tokens([1, 2], rows(2, 0), tokens=["a"])
    with pytest.raises(ValueError, match="no rows"):
        tracker.add_tokens([1], None)
    with pytest.raises(ValueError, match="not of one vocabulary"):
        tracker.add_tokens([1], np.zeros((1, V + 1), np.float16))
    assert len(tracker.iterations) == 1
    assert tracker.iterations[0].logits is not None
    wrong: Any
    for wrong in (
        {"threshold": 0},
        {"patience": 0},
        {"patience": 1.5},
        {"pairs": "some"},
        {"keep_rows": "first"},
        {"base": 10},
        {"temperature": 0},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            IterationTracker(**wrong)


def test_another_vocabulary_is_refused_behind_an_empty_iteration_too(tmp_path: Path) -> None:
    tracker = IterationTracker(keep_rows="all")
    add(tracker, [1, 2])
    add(tracker, [])
    with pytest.raises(ValueError, match="not of one vocabulary"):
        tracker.add_tokens([1], np.zeros((1, V + 1), np.float16))
    tracker.save(tmp_path / "x")
    assert len(IterationTracker.load(tmp_path / "x").iterations) == 2


def test_numbers_of_numpy_are_saved_as_plain_ones(tmp_path: Path) -> None:
    tracker = IterationTracker(threshold=np.float32(0.5))
    add(tracker, [1], score=np.float32(0.25), counts=np.arange(3))
    tracker.save(tmp_path / "x")
    loaded = IterationTracker.load(tmp_path / "x")
    assert loaded.threshold == 0.5
    assert loaded.iterations[0].metadata == {"score": 0.25, "counts": [0, 1, 2]}


def test_an_iteration_is_shown_without_its_tokens_and_rows() -> None:
    tracker = IterationTracker()
    tracker.add_tokens([1] * 900, rows(900, 0), text="hi")
    assert repr(tracker.iterations[0]) == f"<Iteration 'hi', 900 tokens, rows (900, {V}) float16>"


def test_other_files_are_no_trackers(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello, this is no Parquet")
    pq.write_table(pa.table({"x": [1]}), tmp_path / "other")
    for name, message in (("text", "is no Parquet"), ("other", "holds no iterations")):
        with pytest.raises(RowFileError, match=message):
            IterationTracker.load(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        IterationTracker.load(tmp_path / "nothing")
