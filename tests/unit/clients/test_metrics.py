import math
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import jensenshannon
from scipy.special import log_softmax, rel_entr, softmax
from scipy.stats import entropy as scipy_entropy

from logitwire import blocks, entropy, jsd, kl, logprobs_of, perplexity, tvd

TOLERANCE = {"rtol": 1e-6, "atol": 1e-6}

PAIRWISE: list[Callable[..., np.ndarray]] = [jsd, kl, tvd]


def scipys(p: np.ndarray, q: np.ndarray, temperature: float = 1.0) -> dict[str, np.ndarray]:
    """SciPy's numbers for rows in float64, in nats."""
    x, y = (each.astype(np.float64) / temperature for each in (p, q))
    probs_p, probs_q = softmax(x, axis=-1), softmax(y, axis=-1)
    with np.errstate(invalid="ignore"):
        # Rounding takes SciPy below 0 before its root, where rows are almost equal.
        distance = np.nan_to_num(jensenshannon(probs_p, probs_q, axis=-1))
    return {
        "jsd": distance**2,
        # rel_entr knows probabilities only, and those of float64 end at 1e-308.
        "kl": (probs_p * (log_softmax(x, axis=-1) - log_softmax(y, axis=-1))).sum(-1),
        "tvd": np.abs(probs_p - probs_q).sum(-1) / 2,
        "entropy": scipy_entropy(probs_p, axis=-1),
        "logprobs": log_softmax(x, axis=-1)[:, 0],
    }


def ours(p: np.ndarray, q: np.ndarray, temperature: float = 1.0) -> dict[str, np.ndarray]:
    return {
        "jsd": jsd(p, q, "e", temperature=temperature),
        "kl": kl(p, q, "e", temperature=temperature),
        "tvd": tvd(p, q, temperature=temperature),
        "entropy": entropy(p, "e", temperature=temperature),
        "logprobs": logprobs_of(p, np.zeros(len(p), int), temperature=temperature),
    }


@settings(max_examples=80)
@given(
    seed=st.integers(0, 2**32 - 1),
    num=st.integers(1, 7),
    width=st.integers(2, 3000),
    scale=st.sampled_from([1e-3, 1.0, 5.0, 40.0]),
    nearness=st.sampled_from([0.0, 1e-3, 1.0]),
    dtype=st.sampled_from([np.float16, np.float32, np.float64]),
    temperature=st.sampled_from([1.0, 0.5, 3.0]),
)
def test_all_numbers_are_those_of_scipy_in_float64(
    *, seed: int, num: int, width: int, scale: float, nearness: float, dtype: Any, temperature: float
) -> None:
    rng = np.random.default_rng(seed)
    p = (rng.normal(size=(num, width)) * scale).astype(dtype)
    q = (p + rng.normal(size=(num, width)) * scale * nearness).astype(dtype)
    expected = scipys(p, q, temperature)
    for name, got in ours(p, q, temperature).items():
        np.testing.assert_allclose(got, expected[name], **TOLERANCE, err_msg=name)


def test_kl_is_rel_entr_where_no_probability_underflows() -> None:
    p, q = np.random.default_rng(7).normal(size=(2, 4, 500)).astype(np.float32) * 5
    expected = rel_entr(softmax(p.astype(float), axis=-1), softmax(q.astype(float), axis=-1)).sum(-1)
    np.testing.assert_allclose(kl(p, q, "e"), expected, **TOLERANCE)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_rows_as_wide_as_a_large_vocabulary_keep_the_tolerance(dtype: Any) -> None:
    rng = np.random.default_rng(5)
    flat = rng.normal(size=(1, 152_064)).astype(dtype) * dtype(0.01)
    peaked = (rng.normal(size=(1, 152_064)) * 6).astype(dtype)
    for p, q in ((flat, peaked), (peaked, flat), (peaked, peaked[:, ::-1]), (flat, flat[:, ::-1])):
        expected = scipys(p, q)
        for name, got in ours(p, q).items():
            np.testing.assert_allclose(got, expected[name], **TOLERANCE, err_msg=name)


def test_rows_of_float64_keep_its_precision() -> None:
    p, q = np.random.default_rng(6).normal(size=(2, 5, 1000)) * 4
    expected = scipys(p, q)
    for name, got in ours(p, q).items():
        np.testing.assert_allclose(got, expected[name], rtol=1e-12, err_msg=name)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("scale", [0.01, 7, 9000])
def test_equal_rows_have_no_divergence_at_all(dtype: Any, scale: float) -> None:
    rows = (np.random.default_rng(2).normal(size=(9, 4001)) * scale).astype(dtype)
    for measure in PAIRWISE:
        assert (measure(rows, rows.copy()) == 0).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_rows_that_share_nothing_are_as_far_apart_as_can_be(dtype: Any) -> None:
    p = np.array([[0, 0, -np.inf, -np.inf]], dtype)
    q = p[:, ::-1]
    assert jsd(p, q) == [1]
    assert jsd(p, q, "e") == [math.log(2)]
    assert tvd(p, q) == [1]
    assert kl(p, q) == [math.inf]
    assert entropy(p) == pytest.approx([1])
    assert logprobs_of(p, [3]) == [-math.inf]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_minus_infinity_on_both_sides_counts_for_nothing(dtype: Any) -> None:
    p, q = (np.random.default_rng(seed).normal(size=(3, 30)).astype(dtype) for seed in (3, 4))
    hidden = np.full((3, 5), -np.inf, dtype)
    expected = ours(p, q)
    for name, got in ours(np.hstack([p, hidden]), np.hstack([q, hidden])).items():
        np.testing.assert_allclose(got, expected[name], **TOLERANCE, err_msg=name)


def test_kl_is_infinite_only_where_a_possible_token_is_impossible() -> None:
    certain, other = np.array([[0.0, -np.inf]], np.float32), np.array([[0.0, 0.0]], np.float32)
    assert kl(certain, other) == pytest.approx([1])
    assert kl(other, certain) == [math.inf]
    # exp(-60000) is 0 in any float; the logits still say how unlikely it is.
    unlikely = np.array([[0.0, -60000.0]], np.float16)
    assert kl(other, unlikely, "e") == pytest.approx([30000 - math.log(2)])


def test_extreme_logits_neither_warn_nor_leave_the_range() -> None:
    low, high = np.float32(-3e38), np.float32(3e38)
    p, q = np.array([[low, high, 0]]), np.array([[high, low, 0]])
    assert jsd(p, q) == tvd(p, q) == [1]
    assert kl(p, q)[0] > 1e38
    assert entropy(p) == [0]
    assert jsd(p, q, temperature=1e-320) == [1]
    assert entropy(np.array([[1.0, 2.0]], np.float32), temperature=1e30) == pytest.approx([1])


def test_every_half_float_is_widened_exactly() -> None:
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16)[None]
    for values in (halves, halves[np.isfinite(halves)][None], halves[:, ::-1]):
        out = np.empty(values.shape, np.float32)
        blocks.widen(values, out)
        np.testing.assert_array_equal(out, values.astype(np.float32))


def test_logits_may_be_shifted_and_large() -> None:
    p, q = np.array([[1.0, 2.0, 3.0]]), np.array([[3.0, 2.0, 1.0]])
    for measure in PAIRWISE:
        np.testing.assert_allclose(measure(p + 60000, q - 60000), measure(p, q), rtol=1e-9)


def test_base_and_temperature_are_what_they_say() -> None:
    p, q = np.random.default_rng(8).normal(size=(2, 4, 50)).astype(np.float32)
    np.testing.assert_allclose(jsd(p, q) * math.log(2), jsd(p, q, "e"))
    np.testing.assert_allclose(kl(p, q) * math.log(2), kl(p, q, "e"))
    np.testing.assert_allclose(entropy(p) * math.log(2), entropy(p, "e"))
    np.testing.assert_allclose(jsd(p, q, temperature=2.0), jsd(p / 2, q / 2), rtol=1e-5)


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    p, q = np.random.default_rng(1).normal(size=(2, 7, 11)).astype(np.float32)
    whole = ours(p, q)
    monkeypatch.setattr(blocks, "BLOCK_VALUES", 23)
    for name, got in ours(p, q).items():
        np.testing.assert_array_equal(got, whole[name])


def test_long_answers_in_files_take_no_more_memory_than_short_ones(tmp_path: Path) -> None:
    shape = (4096, 3000)
    block = np.random.default_rng(9).normal(size=(64, shape[1])).astype(np.float16)
    path = tmp_path / "rows"
    path.write_bytes(block.tobytes() * (shape[0] // 64))
    rows = np.memmap(path, np.float16, "r", shape=shape)
    tracemalloc.start()
    jsd(rows, rows)
    kl(rows, rows)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * 2**20 < rows.nbytes / 2


def test_the_inputs_are_not_written_to() -> None:
    p, q = np.zeros((1, 3), np.float32), np.ones((1, 3), np.float32)
    ours(p, q)
    assert (p == 0).all()
    assert (q == 1).all()


def test_lists_single_rows_no_rows_and_mixed_types_are_taken() -> None:
    assert jsd([[1, 2]], [[1, 2]]).tolist() == [0]
    assert jsd([1.0, 2.0], [1.0, 2.0]).shape == (1,)
    assert jsd(np.empty((0, 5)), np.empty((0, 5))).shape == entropy(np.empty((0, 5))).shape == (0,)
    p, q = np.random.default_rng(1).normal(size=(2, 3, 9)).astype(np.float16)
    np.testing.assert_allclose(jsd(p, q.astype(np.float64)), jsd(p, q), **TOLERANCE)


def test_perplexity_is_the_exponential_of_the_mean_loss() -> None:
    assert perplexity([math.log(0.5), math.log(0.125)]) == pytest.approx(4)
    assert perplexity(logprobs_of(np.zeros((3, 50)), [0, 7, 49])) == pytest.approx(50)
    assert perplexity([-math.inf]) == perplexity([-1e9]) == math.inf
    for wrong in ([], [math.nan]):
        with pytest.raises(ValueError, match="perplexity needs logprobs"):
            perplexity(wrong)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_rows_that_are_no_distribution_are_named(value: float, dtype: Any) -> None:
    good, bad = np.zeros((50, 7), dtype), np.zeros((50, 7), dtype)
    bad[41, 3] = value
    with pytest.raises(ValueError, match="row 41 of q holds NaN"):
        jsd(good, bad)
    with pytest.raises(ValueError, match="row 41 of the rows holds NaN"):
        entropy(bad)
    bad[41] = -np.inf
    with pytest.raises(ValueError, match="row 41 of p holds .* nothing but -inf"):
        kl(bad, good)


def test_what_cannot_be_compared_is_refused() -> None:
    for measure in PAIRWISE:
        with pytest.raises(ValueError, match=r"2 and 3 columns: not of one vocabulary"):
            measure(np.zeros((1, 2)), np.zeros((1, 3)))
        with pytest.raises(ValueError, match=r"1 and 4 rows; logitwire\.align says"):
            measure(np.zeros((1, 2)), np.zeros((4, 2)))
        with pytest.raises(ValueError, match="shape"):
            measure(np.zeros((1, 2, 3)), np.zeros((1, 2, 3)))
        for temperature in (0, -1, math.nan, math.inf):
            with pytest.raises(ValueError, match="temperature"):
                measure(np.zeros((1, 2)), np.zeros((1, 2)), temperature=temperature)
    with pytest.raises(ValueError, match="base"):
        jsd(np.zeros((1, 2)), np.zeros((1, 2)), base=10)
    with pytest.raises(ValueError, match="shape"):
        entropy(np.zeros((3, 0)))
    for ids in ([0], [0, 2], [0, -1], [0.0, 1.0]):
        with pytest.raises(ValueError, match="token ids"):
            logprobs_of(np.zeros((2, 2)), ids)
