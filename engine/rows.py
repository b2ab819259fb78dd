"""What leaves the device of a step's raw rows: only what somebody asked for, in float32 or the wire's dtype.

Everything is computed on the device, for all rows that need it at once, and comes to the host in one copy of
each kind.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.sampling import raw_logprobs
from engine.types import GenerationRequest, RowDtype, TokenStats, TopLogprobs

TORCH_DTYPES = {RowDtype.FLOAT16: torch.float16, RowDtype.FLOAT32: torch.float32}

Row = NDArray[np.floating]


class Extracts:
    """What the requests of a step asked for, by row.

    Attributes:
        logprobs: Of the chosen token; from the float32 log-softmax over all of V.
        top_logprobs: From the same log-softmax, best first.
        ranks: One more than the number of larger logits.
        id_logprobs: Of the ids that the request names.
        stats: Exact over the whole row.
        selected: float32 (k,), read-only.
        rows: (V,) in the wire's dtype, read-only; memory that nobody else writes.
    """

    def __init__(
        self, logits: Tensor, token_ids: Sequence[int], requests: Sequence[GenerationRequest]
    ) -> None:
        """Compute and fetch.

        Args:
            logits: (B, V), any float dtype, on device. Raw, and never written to.
            token_ids: The token of each row, B of them.
            requests: Of each row, B of them.
        """
        self.logprobs: dict[int, float] = {}
        self.top_logprobs: dict[int, TopLogprobs] = {}
        self.ranks: dict[int, int] = {}
        self.id_logprobs: dict[int, TopLogprobs] = {}
        self.stats: dict[int, TokenStats] = {}
        self.selected: dict[int, NDArray[np.float32]] = {}
        self.rows: dict[int, Row] = {}
        wanted = [row for row, each in enumerate(requests) if each.logprobs or each.token_stats]
        if wanted:
            self._take_logprobs(logits, token_ids, requests, wanted)
        for row, request in enumerate(requests):
            if request.logit_token_ids:
                columns = torch.tensor(request.logit_token_ids, device=logits.device)
                self.selected[row] = _frozen(logits[row, columns].to(torch.float32, copy=True))
        for dtype in RowDtype:
            self._take_rows(
                logits, [row for row, each in enumerate(requests) if each.row_dtype is dtype], dtype
            )

    def _take_logprobs(
        self,
        logits: Tensor,
        token_ids: Sequence[int],
        requests: Sequence[GenerationRequest],
        wanted: list[int],
    ) -> None:
        raw = (logits if len(wanted) == len(logits) else logits[wanted]).float()  # (n, V)
        logprobs = raw_logprobs(raw)
        ids = [token_ids[row] for row in wanted]
        self.logprobs = dict(zip(wanted, _picked(logprobs, ids), strict=True))
        num_top = max(requests[row].num_top_logprobs for row in wanted)
        if num_top:
            values, best = torch.topk(logprobs, min(num_top, logprobs.shape[-1]))
            for row, row_values, row_best in zip(wanted, values.tolist(), best.tolist(), strict=True):
                if num := requests[row].num_top_logprobs:
                    self.top_logprobs[row] = TopLogprobs(row_best[:num], row_values[:num])
        for place, row in enumerate(wanted):
            request = requests[row]
            if request.ranks:
                self.ranks[row] = int((raw[place] > raw[place, ids[place]]).sum()) + 1
            if request.logprob_token_ids:
                columns = logprobs[place, list(request.logprob_token_ids)]
                self.id_logprobs[row] = TopLogprobs(list(request.logprob_token_ids), columns.tolist())
        places = [place for place, row in enumerate(wanted) if requests[row].token_stats]
        if places:
            chosen = torch.tensor([[ids[place]] for place in places], device=raw.device)  # (n, 1)
            stats = token_stats(raw[places], logprobs[places], chosen)
            self.stats = dict(zip((wanted[place] for place in places), stats, strict=True))

    def _take_rows(self, logits: Tensor, wanted: list[int], dtype: RowDtype) -> None:
        if not wanted:
            return
        if logits.device.type == "cpu":
            # The cast is the copy. One row each, since a slow reader must not keep its companions' rows.
            self.rows |= {row: _frozen(logits[row].to(TORCH_DTYPES[dtype], copy=True)) for row in wanted}
            return
        fetched = logits[wanted].to(TORCH_DTYPES[dtype]).cpu()  # (n, V)
        self.rows |= {row: _frozen(fetched[place].clone()) for place, row in enumerate(wanted)}


def token_stats(raw: Tensor, logprobs: Tensor, token_ids: Tensor) -> list[TokenStats]:
    """Return statistics of rows, exact over all of V.

    Args:
        raw: float32 (n, V), on device.
        logprobs: float32 (n, V): its log-softmax.
        token_ids: int64 (n, 1): the token of each row.
    """
    entropy = torch.special.entr(logprobs.exp()).sum(-1)
    logsumexp = torch.logsumexp(raw, -1)
    rank = (raw > raw.gather(1, token_ids)).sum(-1) + 1
    best = torch.topk(raw, 2).values
    margin = best[:, 0] - best[:, 1]
    columns = (each.tolist() for each in (entropy, logsumexp, rank, margin))
    return [TokenStats(*values) for values in zip(*columns, strict=True)]


def _picked(values: Tensor, ids: Sequence[int]) -> list[float]:
    """Return of each row (n, V) the value at its id."""
    if values.device.type == "cpu":
        # Through numpy, since each of torch's small operations costs more than the look at a value.
        return [float(row[token_id]) for row, token_id in zip(values.numpy(), ids, strict=True)]
    return values.gather(1, torch.tensor(ids, device=values.device)[:, None])[:, 0].tolist()  # type: ignore[no-any-return]


def _frozen(values: Tensor) -> NDArray[np.floating]:
    host: NDArray[np.floating] = values.cpu().numpy()
    host.flags.writeable = False
    return host
