"""Numbers from raw rows of logits: divergences of two sets, entropies, logprobs, perplexity.

All of them are of P = softmax(logits / temperature), over all of V. Rows go through in blocks that stay in
the processor's cache, and a block is the only thing that is copied: memory is flat however many rows there
are, and ``numpy.memmap`` or :class:`logitwire.files.RowFile` rows are read as they are needed.

Values of float16 and float32 rows are computed in float32 and summed in float64; the results are within
1e-6 of the same computed in float64 throughout (of the value itself, where that is above 1), and a divergence
below 1e-7 is nothing but rounding. Rows of any other type are computed in float64, so widen rows to see
smaller ones. A logit of -inf is a probability of 0.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from logitwire.blocks import Side, parts, sums, working_dtype
from logitwire.views import RowsLike, as_rows

Base: TypeAlias = Literal[2, "e"]

LOWEST = -1e4
"""Stands for logits that are further below their row's maximum, in products with their probability of 0."""


def jsd(p: RowsLike, q: RowsLike, base: Base = 2, *, temperature: float = 1.0) -> NDArray[np.float64]:
    """Return the Jensen-Shannon divergence of two sets of rows, position by position.

    With M = (P + Q) / 2 it is (KL(P, M) + KL(Q, M)) / 2. It is symmetric, exactly 0 for equal rows, and at
    most 1 in base 2. Source: Lin (1991), "Divergence Measures Based on the Shannon Entropy".

    Args:
        p: (T, V) or (V,) logits.
        q: The same shape.
        base: Of the logarithm: 2 gives bits, "e" gives nats.
        temperature: Divides both before they are compared.

    Returns:
        float64 (T,).

    Raises:
        ValueError: The shapes differ; a row holds NaN or +inf, or -inf only; or an option makes no sense.
    """
    unit = _unit(base)
    found = _over_pairs(p, q, temperature, _jsd_nats)
    return np.clip(found / unit, 0.0, math.log(2) / unit)


def kl(p: RowsLike, q: RowsLike, base: Base = 2, *, temperature: float = 1.0) -> NDArray[np.float64]:
    """Return the Kullback-Leibler divergence of Q from P, position by position.

    It is sum P (ln P - ln Q) over the tokens that P can give; infinite where one of them has a logit of
    -inf in ``q``, and only there: probabilities that are merely too small for a float count by their
    logits. Source: Kullback and Leibler (1951), "On Information and Sufficiency".

    Arguments, result and errors are those of :func:`jsd`.
    """
    unit = _unit(base)
    found = _over_pairs(p, q, temperature, _kl_nats)
    if not np.isfinite(found).all():
        p, q = as_rows(p), as_rows(q)
        for place in np.flatnonzero(~np.isfinite(found)):
            found[place] = _kl_of_one(p[int(place)], q[int(place)], temperature)
    return np.maximum(found / unit, 0.0)


def tvd(p: RowsLike, q: RowsLike, *, temperature: float = 1.0) -> NDArray[np.float64]:
    """Return the total variation distance, position by position: half of sum abs(P - Q), from 0 to 1.

    It is the largest difference of the probabilities that both give to any set of tokens. Source: Levin and
    Peres (2017), "Markov Chains and Mixing Times", proposition 4.2.

    Arguments, result and errors are those of :func:`jsd`.
    """
    return np.minimum(_over_pairs(p, q, temperature, _tvd), 1.0)


def entropy(rows: RowsLike, base: Base = 2, *, temperature: float = 1.0) -> NDArray[np.float64]:
    """Return the entropy of each row: -sum P ln P.

    Source: Shannon (1948), "A Mathematical Theory of Communication".

    Args:
        rows: (T, V) or (V,) logits.
        base: Of the logarithm: 2 gives bits, "e" gives nats.
        temperature: Divides the rows first.

    Returns:
        float64 (T,).

    Raises:
        ValueError: A row holds NaN or +inf, or -inf only; or an option makes no sense.
    """
    unit = _unit(base)
    side = Side(as_rows(rows), "the rows", temperature)
    found = np.empty(side.num)
    for part in parts(side):
        shifted, weights, totals = side.load(part)
        # ln P is the shifted logit less ln(total); both parts of the sum are positive.
        np.maximum(shifted, LOWEST, out=shifted)
        np.multiply(shifted, weights, out=shifted)
        found[part] = (np.log(totals) - sums(shifted) / totals)[:, 0]
    return found / unit


def logprobs_of(rows: RowsLike, token_ids: ArrayLike, *, temperature: float = 1.0) -> NDArray[np.float64]:
    """Return the natural log-softmax of each row at one token.

    Args:
        rows: (T, V) or (V,) logits.
        token_ids: T ids.
        temperature: Divides the rows first; 1 gives what the server calls ``logprob``.

    Returns:
        float64 (T,); -inf where the logit is.

    Raises:
        ValueError: As for :func:`entropy`, or the ids are not T, or not all from 0 to V-1.
    """
    side = Side(as_rows(rows), "the rows", temperature)
    ids = np.atleast_1d(np.asarray(token_ids))
    if ids.shape != (side.num,):
        raise ValueError(f"{side.num} rows need as many token ids, not {ids.shape}")
    if side.num and not (np.issubdtype(ids.dtype, np.integer) and 0 <= ids.min() <= ids.max() < side.width):
        raise ValueError(f"token ids are integers from 0 to {side.width - 1}")
    found = np.empty(side.num)
    for part in parts(side):
        shifted, _, totals = side.load(part)
        found[part] = shifted[np.arange(len(shifted)), ids[part]] - np.log(totals[:, 0])
    return found


def perplexity(logprobs: ArrayLike) -> float:
    """Return exp(-mean) of natural logprobs. Source: Jelinek et al. (1977), "Perplexity".

    Args:
        logprobs: T numbers, such as those of a result or of :func:`logprobs_of`.

    Returns:
        From 1 up; infinite if a logprob is -inf.

    Raises:
        ValueError: There are none, or one is NaN.
    """
    values = np.asarray(logprobs, np.float64)
    if values.size == 0 or np.isnan(values).any():
        raise ValueError("perplexity needs logprobs, and none of them NaN")
    with np.errstate(over="ignore"):
        return float(np.exp(-values.mean()))


_Kernel: TypeAlias = Callable[[Any, Any], NDArray[np.float64]]
"""From what :meth:`Side.load` gave of both sides, to one number per row, float64 (k, 1)."""


def _over_pairs(p: RowsLike, q: RowsLike, temperature: float, kernel: _Kernel) -> NDArray[np.float64]:
    p, q = as_rows(p), as_rows(q)
    if p.shape[1] != q.shape[1]:
        raise ValueError(f"the rows have {p.shape[1]} and {q.shape[1]} columns: not of one vocabulary")
    if p.shape[0] != q.shape[0]:
        raise ValueError(
            f"there are {p.shape[0]} and {q.shape[0]} rows; logitwire.align says which are comparable"
        )
    dtype = np.result_type(working_dtype(p), working_dtype(q))
    sides = Side(p, "p", temperature, dtype), Side(q, "q", temperature, dtype)
    found = np.empty(p.shape[0])
    for part in parts(sides[0]):
        with np.errstate(all="ignore"):
            found[part] = kernel(sides[0].load(part), sides[1].load(part))[:, 0]
    return found


def _jsd_nats(one: Any, other: Any) -> NDArray[np.float64]:
    """Return sum P ln(P / M) / 2 + sum Q ln(Q / M) / 2, (k, 1).

    The ratios to M are formed first: where P and Q are equal they are exactly 1 and their logarithms
    exactly 0, and an error in the normalisation is damped, since P ln P and M ln M are never subtracted.
    """
    (middle, p, total_p), (scratch, q, total_q) = one, other
    tiny = np.finfo(p.dtype).tiny
    _normalise(p, total_p)
    _normalise(q, total_q)
    np.add(p, q, out=middle)
    np.multiply(middle, 0.5, out=middle)
    np.maximum(middle, tiny, out=middle)
    np.divide(p, middle, out=scratch)
    _times_log(p, scratch, tiny)
    np.divide(q, middle, out=middle)
    _times_log(q, middle, tiny)
    np.add(scratch, middle, out=middle)
    found: NDArray[np.float64] = sums(middle) / 2
    return found


def _times_log(probs: NDArray[np.floating], ratio: NDArray[np.floating], tiny: np.floating) -> None:
    """Turn a ratio into probs * ln(ratio), in place; 0 where both are."""
    np.maximum(ratio, tiny, out=ratio)
    np.log(ratio, out=ratio)
    np.multiply(ratio, probs, out=ratio)


def _kl_nats(one: Any, other: Any) -> NDArray[np.float64]:
    """Return sum P (ln P - ln Q), (k, 1); NaN or infinite where -inf or too large a logit is involved."""
    (shifted_p, weights_p, total_p), (shifted_q, _, total_q) = one, other
    np.subtract(shifted_p, shifted_q, out=shifted_p)
    np.multiply(shifted_p, weights_p, out=shifted_p)
    found: NDArray[np.float64] = sums(shifted_p) / total_p - (np.log(total_p) - np.log(total_q))
    return found


def _kl_of_one(p: ArrayLike, q: ArrayLike, temperature: float) -> float:
    """Return the divergence in nats of two rows (V,) in float64, where some logits are -inf."""
    log_p, log_q = (_log_softmax(np.asarray(row, np.float64), temperature) for row in (p, q))
    is_possible = log_p > -math.inf
    log_p, log_q = log_p[is_possible], log_q[is_possible]
    return float((np.exp(log_p) * (log_p - log_q)).sum()) if (log_q > -math.inf).all() else math.inf


def _log_softmax(row: NDArray[np.float64], temperature: float) -> NDArray[np.float64]:
    with np.errstate(all="ignore"):
        shifted = (row - row.max()) / temperature
    log_softmax: NDArray[np.float64] = shifted - math.log(np.exp(shifted).sum())
    return log_softmax


def _tvd(one: Any, other: Any) -> NDArray[np.float64]:
    (_, p, total_p), (_, q, total_q) = one, other
    _normalise(p, total_p)
    _normalise(q, total_q)
    np.subtract(p, q, out=p)
    np.abs(p, out=p)
    found: NDArray[np.float64] = sums(p) / 2
    return found


def _normalise(weights: NDArray[np.floating], totals: NDArray[np.float64]) -> None:
    np.multiply(weights, (1 / totals).astype(weights.dtype), out=weights)


def _unit(base: Base) -> float:
    if base not in (2, "e"):
        raise ValueError(f"base must be 2 or 'e', not {base!r}")
    return math.log(2) if base == 2 else 1.0
