"""Rows for tokens that are known already: which to run next, and what to deliver of them.

It decides and computes; the worker runs what it decides, and deals with failures.
"""

from collections.abc import Sequence as List
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
from torch import Tensor

from engine.divergence import divergences
from engine.rows import Extracts
from engine.sampling import rows_fault
from engine.sequence import Sequence
from engine.types import TOP_BYTES, GenerationRequest, RowDtype, TokenEvent

MAX_ROW_BYTES = 64 * 2**20
"""Of the rows that exist at once, in float32; all those of a long prompt would not fit."""

EXTRACT_BYTES = 8 * 2**20
"""Of the rows that are worked on at once, so that copies of them stay near the processor."""

PADDED_SHARE = 1.25
"""Columns that a shared pass may run, as a share of those with a token in them."""


@dataclass(frozen=True, slots=True)
class ScoreChunk:
    """Tokens of one sequence to run next.

    Attributes:
        num: How many.
        keep: Rows of the last ones that are wanted; 0 while it is context.
    """

    sequence: Sequence
    num: int
    keep: int


_NOTHING = np.empty(0, np.float32)

Unit = list[ScoreChunk]
"""What runs in step: the chunk of one sequence, or those of the two contexts that are compared."""


def next_scores(
    sequences: List[Sequence], *, max_tokens: int, vocab_size: int, outbox_bytes: int
) -> list[Unit]:
    """Return whose rows to run next, all in one pass.

    The first one is served in any case. Those that are nearest to its length join it, while the padded pass
    is no larger than a chunk of prompts, and little of it is padding.

    Args:
        sequences: Those that want rows and may run, in the order of their claims; at least one.
        max_tokens: Of a pass.
        vocab_size: V.
        outbox_bytes: What one outbox may hold; half of it is filled at once, so that the next rows can be
            computed while these are sent.
    """
    max_rows = max(1, MAX_ROW_BYTES // (4 * vocab_size))

    def unit_of(sequence: Sequence) -> Unit:
        row_bytes = held_bytes(sequence.request, vocab_size)
        rows = min(max_rows, max(1, outbox_bytes // 2 // row_bytes)) if row_bytes else max_rows
        return _unit(sequence, max_tokens, rows)

    first = unit_of(sequences[0])
    units, chunks = [first], list(first)
    length = max(chunk.num for chunk in first)
    others = [unit_of(each) for each in sequences[1:]]
    for unit in sorted(others, key=lambda unit: abs(max(chunk.num for chunk in unit) - length)):
        together = [*chunks, *unit]
        padded = len(together) * max(chunk.num for chunk in together)
        if (
            bool(unit[0].keep) == bool(first[0].keep)
            and padded <= max_tokens
            and padded <= PADDED_SHARE * sum(chunk.num for chunk in together)
            and len(together) * max(chunk.keep for chunk in together) <= max_rows
        ):
            units.append(unit)
            chunks = together
    return units


def _unit(sequence: Sequence, max_tokens: int, max_rows: int) -> Unit:
    """Return what one sequence would run next, alone: context as long as that fills a pass, else rows."""
    contexts = sequence.contexts
    max_num = max(1, max_tokens // len(contexts))
    longest = max(each.num_context_left for each in contexts)
    if longest >= max_num:
        unit = [ScoreChunk(each, min(each.num_context_left, max_num), 0) for each in contexts]
        return [chunk for chunk in unit if chunk.num]
    # The two contexts of a comparison give the rows of the same tokens.
    keep = max(1, min(sequence.num_rows_left, max_num - longest, max_rows // len(contexts)))
    return [ScoreChunk(each, each.num_context_left + keep, keep) for each in contexts]


def held_bytes(request: GenerationRequest, vocab_size: int) -> int:
    """Return how much one row of a prompt takes in the outbox."""
    dtype = request.prompt_row_dtype
    num_columns = max(map(len, request.prompt_columns), default=len(request.logit_token_ids))
    row = 0 if dtype is None else vocab_size * (2 if dtype is RowDtype.FLOAT16 else 4)
    return row + 4 * num_columns + TOP_BYTES * request.num_prompt_top_logprobs


def score_events(sequence: Sequence, rows: List[Tensor]) -> list[TokenEvent]:
    """Return the events of a sequence's next rows.

    Args:
        sequence: Not told yet of these rows.
        rows: (T, V) on device, of the sequence and of its contrast. Row i predicts the token i places behind
            :attr:`engine.sequence.Sequence.next_row_place` plus 1. A last row that is for the choice of the
            first generated token is no part of them.

    Raises:
        ModelFaultError: A row cannot be served.
    """
    request, num = sequence.request, len(rows[0])
    for each in rows:
        if fault := rows_fault(each, request.prompt_row_dtype):
            raise fault
    first = sequence.next_row_place + 1
    ids = list(request.prompt_token_ids[first : first + num])
    if request.contrast is not None:
        found = divergences(rows[0], rows[1], ids, request.contrast.temperature)
        return [
            TokenEvent(token_id, (), is_prompt=True, divergence=each)
            for token_id, each in zip(ids, found, strict=True)
        ]
    asked = replace(
        request,
        row_dtype=request.prompt_row_dtype,
        logprobs=True,
        num_top_logprobs=request.num_prompt_top_logprobs,
    )
    columns = request.prompt_columns[sequence.num_prompt_rows :][:num]
    requests = [replace(asked, logit_token_ids=each) for each in columns] or [asked] * num
    named = request.prompt_logprob_token_ids[sequence.num_prompt_rows :][:num]
    if named:
        requests = [replace(each, logprob_token_ids=ids) for each, ids in zip(requests, named, strict=True)]
    step = max(1, EXTRACT_BYTES // (4 * rows[0].shape[-1]))
    parts = [slice(start, start + step) for start in range(0, num, step)]
    return list(
        chain.from_iterable(
            _extracted(
                rows[0][part], ids[part], requests[part], ends_behind=len(ids) < num and part is parts[-1]
            )
            for part in parts
        )
    )


def _extracted(
    rows: Tensor, token_ids: list[int], requests: List[GenerationRequest], *, ends_behind: bool
) -> list[TokenEvent]:
    """Return the events of a few rows (n, V); the last one may be the row behind all tokens."""
    extracts = Extracts(rows, token_ids + [0] * ends_behind, requests)
    events = [
        TokenEvent(
            token_id,
            (),
            extracts.logprobs.get(place),
            extracts.top_logprobs.get(place),
            row=extracts.rows.get(place),
            stats=extracts.stats.get(place),
            # A row of which no column is wanted is still one of a list.
            selected=extracts.selected.get(place, _NOTHING if requests[place].prompt_columns else None),
            is_prompt=True,
            rank=extracts.ranks.get(place),
            id_logprobs=extracts.id_logprobs.get(place),
        )
        for place, token_id in enumerate([*token_ids, -1] if ends_behind else token_ids)
    ]
    if ends_behind:
        last = events[-1]
        stats = None if last.stats is None else replace(last.stats, rank=0)
        events[-1] = replace(last, logprob=0.0, stats=stats, rank=None if last.rank is None else 0)
    return events
