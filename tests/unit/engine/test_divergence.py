import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import jensenshannon
from scipy.special import log_softmax, rel_entr, softmax
from scipy.stats import entropy

from engine import divergence
from engine.divergence import divergences
from engine.types import Divergence


def reference(x: np.ndarray, y: np.ndarray, token_id: int, temperature: float) -> Divergence:
    """SciPy's numbers for two rows, in float64."""
    p, q = (softmax(row.astype(np.float64) / temperature) for row in (x, y))
    return Divergence(
        jsd=float(jensenshannon(p, q) ** 2),
        kl_pq=float(rel_entr(p, q).sum()),
        kl_qp=float(rel_entr(q, p).sum()),
        tvd=float(np.abs(p - q).sum() / 2),
        entropy_p=float(entropy(p)),
        entropy_q=float(entropy(q)),
        logprob_p=float(log_softmax(x.astype(np.float64))[token_id]),
        logprob_q=float(log_softmax(y.astype(np.float64))[token_id]),
    )


def assert_close(got: Divergence, expected: Divergence, tolerance: float = 1e-9) -> None:
    for name in Divergence.__slots__:
        assert getattr(got, name) == pytest.approx(getattr(expected, name), abs=tolerance, rel=1e-9), name


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num=st.integers(1, 7),
    width=st.integers(2, 40),
    scale=st.sampled_from([0.01, 1.0, 30.0]),
    temperature=st.sampled_from([1.0, 0.5, 2.0]),
)
def test_all_numbers_are_scipys(seed: int, num: int, width: int, scale: float, temperature: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(num, width, generator=generator) * scale for _ in range(2))
    ids = torch.randint(width, (num,), generator=generator).tolist()
    kept = x.clone()
    got = divergences(x, y, ids, temperature)
    assert torch.equal(x, kept)
    for place in range(num):
        assert_close(got[place], reference(x[place].numpy(), y[place].numpy(), ids[place], temperature))


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.randn(9, 50), torch.randn(9, 50)
    whole = divergences(x, y, list(range(9)))
    monkeypatch.setattr(divergence, "BLOCK_VALUES", 100)
    for one, other in zip(whole, divergences(x, y, list(range(9))), strict=True):
        assert_close(one, other, 1e-14)


def test_equal_rows_are_no_distance_apart() -> None:
    row = torch.randn(1, 1000) * 8
    (got,) = divergences(row, row.clone(), [3])
    assert (got.tvd, got.kl_pq, got.kl_qp) == (0, 0, 0)
    assert got.jsd == pytest.approx(0, abs=1e-14)
    assert got.entropy_p == got.entropy_q


def test_rows_with_nothing_in_common_are_as_far_apart_as_can_be() -> None:
    x = torch.tensor([[0.0, 0.0, -math.inf, -math.inf]])
    (got,) = divergences(x, x.flip(1), [0])
    assert got.jsd == pytest.approx(math.log(2))
    assert got.tvd == pytest.approx(1)
    assert got.kl_pq == got.kl_qp == math.inf
    assert got.entropy_p == pytest.approx(math.log(2))
    assert (got.logprob_p, got.logprob_q) == (pytest.approx(-math.log(2)), -math.inf)


def test_minus_infinity_on_both_sides_counts_for_nothing() -> None:
    x, y = torch.randn(1, 30), torch.randn(1, 30)
    (expected,) = divergences(x, y, [4])
    hidden = torch.full((1, 5), -math.inf)
    (got,) = divergences(torch.cat([x, hidden], 1), torch.cat([y, hidden], 1), [4])
    assert_close(got, expected, 1e-14)


def test_half_precision_rows_are_widened_first() -> None:
    x, y = torch.randn(2, 100, dtype=torch.bfloat16), torch.randn(2, 100, dtype=torch.bfloat16)
    for one, other in zip(divergences(x, y, [1, 2]), divergences(x.float(), y.float(), [1, 2]), strict=True):
        assert one == other
