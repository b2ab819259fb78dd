"""Comparisons of rows of logits."""

import math
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

BLOCK_VALUES = 2**20
"""Values per block; a block in float64 and its intermediates take some 64 MiB."""


def jsd(p: ArrayLike, q: ArrayLike, base: Literal[2, "e"] = 2) -> NDArray[np.float64]:
    """Return the Jensen-Shannon divergence of the distributions behind two sets of logits, per position.

    With P = softmax(p), Q = softmax(q) and M = (P + Q) / 2 it is (KL(P, M) + KL(Q, M)) / 2. It is symmetric,
    0 for equal distributions, and at most 1 in base 2. Source: Lin (1991), "Divergence Measures Based on the
    Shannon Entropy". Everything is computed in float64; the rows go through in blocks, so memory stays flat.

    Args:
        p: (T, V) or (V,) logits, any float dtype; -inf is a probability of 0.
        q: The same shape.
        base: Of the logarithm: 2 gives bits, "e" gives nats.

    Returns:
        float64 (T,).

    Raises:
        ValueError: The shapes differ, or the base is neither.
    """
    p, q = np.atleast_2d(np.asarray(p)), np.atleast_2d(np.asarray(q))
    if p.shape != q.shape:
        raise ValueError(f"the rows have shapes {p.shape} and {q.shape}; compare equally many of equal width")
    if base not in (2, "e"):
        raise ValueError(f"base must be 2 or 'e', not {base!r}")
    unit = math.log(2) if base == 2 else 1.0
    num, width = p.shape
    result = np.empty(num)
    step = max(1, BLOCK_VALUES // width)
    for start in range(0, num, step):
        block = slice(start, start + step)
        result[block] = _jsd_nats(p[block].astype(np.float64), q[block].astype(np.float64))
    return np.clip(result / unit, 0.0, math.log(2) / unit)


def _jsd_nats(p: NDArray[np.float64], q: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the divergence of (k, V) logits in nats; both are overwritten."""
    for logits in (p, q):
        np.subtract(logits, logits.max(axis=-1, keepdims=True), out=logits)
        np.subtract(logits, np.log(np.exp(logits).sum(axis=-1, keepdims=True)), out=logits)
    total = np.zeros(len(p))
    for own, other in ((p, q), (q, p)):
        # ln(own / middle) = ln 2 - ln(1 + other / own): exactly 0 where the two are equal. A probability of 0
        # contributes 0, and its logarithm is -inf.
        probs = np.exp(own)
        ratio = np.subtract(other, own, out=np.zeros_like(own), where=probs > 0)
        total += (probs * (math.log(2) - np.logaddexp(0, ratio))).sum(axis=-1)
    return total / 2
