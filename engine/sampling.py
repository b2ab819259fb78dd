"""From raw rows to token ids and logprobs. Pure functions: the raw rows are never written to."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class SampledRow:
    """What the choice of one row's next token depends on, beside the row and its group's settings.

    Attributes:
        token_ids: Prompt and completion so far.
        num_prompt_tokens: How many of those are the prompt.
        generator: On the row's device; a greedy row does not consume it.
        forbidden: Ids that must not be chosen now, unless ``allowed`` leaves nothing else.
        allowed: The only ids that a grammar allows, as :func:`engine.masks.forbid` takes them.
        wants_support: Whether to return the ids that could have been drawn.
    """

    token_ids: Sequence[int]
    num_prompt_tokens: int
    generator: torch.Generator
    forbidden: Collection[int] = ()
    allowed: NDArray[np.uint8] | None = None
    wants_support: bool = False


def sample(
    logits: Tensor, params: SamplingParams, rows: Sequence[SampledRow], *, num_ids: int
) -> tuple[list[int], dict[int, list[int]]]:
    """Choose the next token of every row of one group.

    Args:
        logits: (B, V), any float dtype, on device. Raw; row b predicts the next token of row b. Never
            written to.
        params: The settings that all rows of the group share.
        rows: What differs from row to row, B of them.
        num_ids: Ids from here on are padding of the head, and never chosen.

    Returns:
        One id per row; and by row, where it is wanted, the ids among which it was chosen.
    """
    processed = logits
    is_edited = _edits_logits(params) or any(row.forbidden for row in rows)
    masks = {place: row.allowed for place, row in enumerate(rows) if row.allowed is not None}
    if is_edited or masks or not is_greedy(params):
        processed = processed.to(torch.float32, copy=True)
    if is_edited:
        # At full width, since a prompt of ids may hold those of the padding.
        # Row by row, since their histories differ in length.
        for place, row in enumerate(rows):
            _edit(processed[place], params, row)
        # An extreme penalty overflows, and infinities would become NaN below.
        limit = torch.finfo(torch.float32).max / 4
        processed = torch.nan_to_num(processed, nan=0.0, posinf=limit, neginf=-limit)
        for place, row in enumerate(rows):
            # Only now, so that nothing is more unlikely than what is forbidden.
            processed[place, list(row.forbidden)] = -torch.inf
    processed = processed[:, :num_ids]
    if masks:
        forbid(processed, masks)
    if is_greedy(params):
        chosen = _argmax(processed)
        return chosen, {place: [chosen[place]] for place, row in enumerate(rows) if row.wants_support}
    processed = _processors(params)(None, processed)
    probs = torch.softmax(processed, dim=-1)  # (B, num_ids)
    chosen = [
        int(torch.multinomial(probs[place], 1, generator=row.generator)) for place, row in enumerate(rows)
    ]
    supports = {
        place: (processed[place] > -torch.inf).nonzero()[:, 0].tolist()
        for place, row in enumerate(rows)
        if row.wants_support
    }
    return chosen, supports


def _edits_logits(params: SamplingParams) -> bool:
    """Tell whether these params change logits before temperature and filters."""
    return (
        params.repetition_penalty != 1
        or params.frequency_penalty != 0
        or params.presence_penalty != 0
        or bool(params.logit_bias)
    )


def _edit(logits: Tensor, params: SamplingParams, row: SampledRow) -> None:
    """Apply bias and penalties in place, in the order of Transformers and vLLM: the bias comes first.

    The frequency and presence penalties follow the formula of OpenAI's API reference: a token that the
    completion holds c times, c > 0, loses ``c * frequency_penalty + presence_penalty``.

    Args:
        logits: float32 (V,), a copy.
        params: Of the row's group.
        row: The row's history.
    """
    if params.logit_bias:
        ids, bias = zip(*params.logit_bias, strict=True)
        logits[list(ids)] += torch.tensor(bias, device=logits.device)
    if params.repetition_penalty != 1:
        penalty = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)
        history = torch.tensor([row.token_ids], device=logits.device)
        logits.copy_(penalty(history, logits[None])[0])
    completion = row.token_ids[row.num_prompt_tokens :]
    if completion and (params.frequency_penalty or params.presence_penalty):
        used, counts = torch.tensor(completion, device=logits.device).unique(return_counts=True)
        logits[used] -= counts * params.frequency_penalty + params.presence_penalty


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


def rows_fault(rows: Tensor, dtype: RowDtype | None) -> ModelFaultError | None:
    """Return what makes one of several raw rows (n, V) unservable, if anything; see :func:`row_fault`."""
    highest = rows.amax(-1)
    is_narrowed = dtype is RowDtype.FLOAT16 and rows.dtype != torch.float16
    is_good = highest.isfinite()
    if is_narrowed:
        is_good &= (highest <= MAX_FLOAT16) & (rows.amin(-1) >= -MAX_FLOAT16)
    # Minus infinity is legal, so those that look bad are looked at again.
    faults = (row_fault(rows[place], dtype) for place in torch.nonzero(~is_good)[:, 0].tolist())
    return next((fault for fault in faults if fault is not None), None)


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
