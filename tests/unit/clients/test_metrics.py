import numpy as np
import pytest
from scipy.spatial.distance import jensenshannon
from scipy.special import softmax

from logitwire import jsd, metrics


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_jsd_agrees_with_scipy(dtype: type) -> None:
    rng = np.random.default_rng(0)
    p, q = (rng.normal(size=(5, 1000)).astype(dtype) * 4 for _ in range(2))
    expected = jensenshannon(softmax(p.astype(float), -1), softmax(q.astype(float), -1), axis=-1) ** 2
    np.testing.assert_allclose(jsd(p, q, base="e"), expected, rtol=1e-9)
    np.testing.assert_allclose(jsd(p, q), expected / np.log(2), rtol=1e-9)


def test_equal_rows_have_none_and_disjoint_rows_have_one_bit() -> None:
    p, q = np.array([[0.0, -np.inf]]), np.array([[-np.inf, 0.0]])
    assert jsd(p, p) == [0]
    rows = np.random.default_rng(2).normal(size=(9, 100)) * 7
    assert (jsd(rows, rows) == 0).all()
    assert jsd(p, q) == [1]


def test_logits_may_be_shifted_and_large() -> None:
    p, q = np.array([[1.0, 2.0, 3.0]]), np.array([[3.0, 2.0, 1.0]])
    np.testing.assert_allclose(jsd(p + 60000, q - 60000), jsd(p, q), rtol=1e-9)


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    p, q = rng.normal(size=(2, 7, 11))
    whole = jsd(p, q)
    monkeypatch.setattr(metrics, "BLOCK_VALUES", 23)
    np.testing.assert_array_equal(jsd(p, q), whole)


def test_the_inputs_are_not_written_to() -> None:
    p, q = np.zeros((1, 3)), np.ones((1, 3))
    jsd(p, q)
    assert (p == 0).all()
    assert (q == 1).all()


def test_shapes_and_bases_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(1, 2\) and \(1, 3\)"):
        jsd(np.zeros((1, 2)), np.zeros((1, 3)))
    with pytest.raises(ValueError, match="base"):
        jsd(np.zeros((1, 2)), np.zeros((1, 2)), base=10)
