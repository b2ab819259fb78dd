"""From raw rows to token ids and logprobs. Pure functions: the raw rows are never written to."""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.errors import LogitsOverflowError, ModelFaultError, NonFiniteLogitsError
from engine.masks import forbid
from engine.types import RowDtype, SamplingParams

GREEDY_TEMPERATURE = 1e-5
"""Below this a draw is the argmax: the gap of two float32 logits, divided by it, underflows softmax."""

MAX_FLOAT16 = 65504.0


class _SubtractMax(LogitsProcessor):  # type: ignore[misc]
    """Moves each row's maximum to 0, so that a small temperature cannot overflow it."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores - scores.amax(dim=-1, keepdim=True)


def is_greedy(params: SamplingParams) -> bool:
    """Tell whether these params pick the argmax and need no generator."""
    return params.temperature < GREEDY_TEMPERATURE or params.top_k == 1 or params.top_p == 0


@lru_cache(256)
def _processors(params: SamplingParams) -> LogitsProcessorList:
    """Return Transformers' own chain for params, in the order of its ``generate``."""
    chain = LogitsProcessorList()
    if not is_greedy(params):
        chain.append(_SubtractMax())
        if params.temperature != 1:
            chain.append(TemperatureLogitsWarper(params.temperature))
        if params.top_k > 0:
            chain.append(TopKLogitsWarper(params.top_k))
        if params.top_p < 1:
            chain.append(TopPLogitsWarper(params.top_p))
        if params.min_p > 0:
            chain.append(MinPLogitsWarper(params.min_p))
    return chain


def sample(
    logits: Tensor,
    params: SamplingParams,
    *,
    token_ids: Sequence[Sequence[int]],
    generators: Sequence[torch.Generator],
    num_ids: int,
    masks: Mapping[int, NDArray[np.uint8]] | None = None,
) -> list[int]:
    """Choose the next token of every row of one group.

    Args:
        logits: (B, V), any float dtype, on device. Raw; row b predicts the next token of row b. Never
            written to.
        params: The settings that all rows of the group share.
        token_ids: Prompt and completion of each row so far; the repetition penalty looks at them.
        generators: One per row, on the rows' device; greedy rows do not consume theirs.
        num_ids: Ids from here on are padding of the head, and never chosen.
        masks: For rows whose grammar has a say: the ids that may be chosen, see :func:`engine.masks.forbid`.

    Returns:
        One id per row.
    """
    processed = logits
    if num_ids < logits.shape[-1]:
        processed = logits[:, :num_ids]
    if params.repetition_penalty != 1 or not is_greedy(params) or masks:
        processed = processed.to(torch.float32, copy=True)
    if masks:
        forbid(processed, masks)
    if params.repetition_penalty != 1:
        penalty = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)
        # Row by row, since their histories differ in length.
        for row, history in enumerate(token_ids):
            ids = torch.tensor([history], device=processed.device)
            processed[row] = penalty(ids, processed[row : row + 1])[0]
        # An extreme penalty overflows, and infinities would become NaN below.
        limit = torch.finfo(torch.float32).max / 4
        processed = torch.nan_to_num(processed, nan=0.0, posinf=limit, neginf=-limit)
    if is_greedy(params):
        return _argmax(processed)
    processed = _processors(params)(None, processed)
    probs = torch.softmax(processed, dim=-1)  # (B, num_ids)
    return [
        int(torch.multinomial(probs[row], 1, generator=generator)) for row, generator in enumerate(generators)
    ]


def _argmax(rows: Tensor) -> list[int]:
    """Return the index of each row's largest value, the first one on a tie."""
    if rows.device.type == "cpu" and rows.dtype == torch.float32:
        # numpy's is vectorised, and over ten times as fast on one row of a large vocabulary.
        return rows.numpy().argmax(axis=-1).tolist()  # type: ignore[no-any-return]
    return rows.argmax(dim=-1).tolist()  # type: ignore[no-any-return]


def raw_logprobs(logits: Tensor) -> Tensor:
    """Return the float32 log-softmax of raw rows.

    Args:
        logits: (B, V), any float dtype, on device.

    Returns:
        float32 (B, V), on device.
    """
    return torch.log_softmax(logits.float(), dim=-1)


def row_fault(row: Tensor, dtype: RowDtype | None) -> ModelFaultError | None:
    """Return what makes a raw row unservable, if anything.

    Args:
        row: (V,), any float dtype.
        dtype: The wire dtype that it is to be cast to, if any. Minus infinity is legal in both.
    """
    highest = float(row.amax())  # NaN if any value is NaN
    if not math.isfinite(highest):
        return NonFiniteLogitsError("the model returned NaN, infinity or nothing but -inf in a row of logits")
    if dtype is not RowDtype.FLOAT16 or row.dtype == torch.float16:
        return None
    lowest = float(row.amin())
    if lowest == -math.inf:
        lowest = float(row[row > -math.inf].amin())
    if max(highest, -lowest) > MAX_FLOAT16:
        return LogitsOverflowError("a logit is beyond float16; ask for float32 rows (b64_fp32)")
    return None
