"""How far two distributions are apart: pure functions of raw rows, on the rows' device.

Of p = softmax(x / t) and q = softmax(y / t), with natural logarithms, summed over all of V in float64:

- KL(p, q) = sum p (ln p - ln q): Kullback and Leibler (1951), "On Information and Sufficiency".
- JSD(p, q) = H(m) - (H(p) + H(q)) / 2 with m = (p + q) / 2: Lin (1991), "Divergence Measures Based on the
  Shannon Entropy", with equal weights. Symmetric, and from 0 to ln 2.
- TVD(p, q) = sum |p - q| / 2.
- H(p) = -sum p ln p: Shannon (1948), "A Mathematical Theory of Communication".
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.types import Divergence

BLOCK_VALUES = 2**19
"""Values of one temporary; 4 MiB in float64, so that the few that there are stay near the processor."""


def divergences(
    rows_p: Tensor, rows_q: Tensor, token_ids: Sequence[int], temperature: float = 1.0
) -> list[Divergence]:
    """Compare the rows of two contexts, token by token.

    Args:
        rows_p: (T, V), any float dtype, on device. Raw, and never written to; minus infinity is legal.
        rows_q: (T, V), likewise.
        token_ids: The token of each row, T of them.
        temperature: Divides both rows before they are compared, but not for the logprobs.

    Returns:
        T of them, in nats.
    """
    step = max(1, BLOCK_VALUES // rows_p.shape[-1])
    found: list[Divergence] = []
    for start in range(0, len(token_ids), step):
        part = slice(start, start + step)
        ids = torch.tensor(token_ids[part], device=rows_p.device)[:, None]  # (n, 1)
        found += _block(rows_p[part], rows_q[part], ids, temperature)
    return found


def _block(rows_p: Tensor, rows_q: Tensor, token_ids: Tensor, temperature: float) -> list[Divergence]:
    """Compare a few rows (n, V); see :func:`divergences`."""
    # The logits are float32 exactly as they came; only the arithmetic behind them is wider.
    x, y = rows_p.double(), rows_q.double()  # (n, V)
    logprobs = [_at(each, token_ids) for each in (x, y)]  # (n,)
    if temperature != 1:
        # Less their maximum, since a tiny temperature would overflow it.
        x, y = ((each - each.amax(-1, keepdim=True)) / temperature for each in (x, y))
    (p, log_p), (q, log_q) = _softmax(x), _softmax(y)
    entropy_p, entropy_q = -_expected(p, log_p), -_expected(q, log_q)
    kl_pq = -entropy_p - _expected(p, log_q)
    kl_qp = -entropy_q - _expected(q, log_p)
    tvd = (p - q).abs_().sum(-1) / 2
    middle = p.add_(q).div_(2)
    jsd = torch.special.entr(middle).sum(-1) - (entropy_p + entropy_q) / 2
    # Rounding may leave equal rows a little below 0, and rows that share nothing a little above ln 2.
    jsd = jsd.clamp_(max=math.log(2))
    jsd, kl_pq, kl_qp, entropy_p, entropy_q = (
        each.clamp_(min=0) for each in (jsd, kl_pq, kl_qp, entropy_p, entropy_q)
    )
    columns = torch.stack([jsd, kl_pq, kl_qp, tvd, entropy_p, entropy_q, *logprobs])  # (8, n)
    return [Divergence(*values) for values in columns.T.tolist()]


def _softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return softmax and log-softmax of float64 rows (n, V), with one exponential for both."""
    log_p = logits - logits.amax(-1, keepdim=True)
    p = log_p.exp()
    total = p.sum(-1, keepdim=True)
    return p.div_(total), log_p.sub_(total.log())


def _expected(p: Tensor, values: Tensor) -> Tensor:
    """Return the sums (n,) of values weighted by p, where 0 times anything is 0."""
    sums = (p * values).sum(-1)
    if not sums.isnan().any():
        return sums
    return torch.where(p > 0, p * values, 0.0).sum(-1)


def _at(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Return the log-softmax (n,) of float64 rows at one id (n, 1) each."""
    return (logits.gather(1, token_ids) - torch.logsumexp(logits, -1, keepdim=True))[:, 0]
