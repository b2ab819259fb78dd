"""One prompt and its completion inside the engine: state of the worker thread, never shared."""

import time
from dataclasses import dataclass, replace

import torch

from engine.grammar import GrammarState
from engine.outbox import Outbox
from engine.stopping import StopChecker
from engine.types import GenerationRequest, Timings


@dataclass(slots=True, eq=False)
class Sequence:
    """A request on its way, with its own generator and stop state.

    Attributes:
        sequence_id: Names the KV cache in the runner.
        token_ids: Prompt and completion so far.
        stop_ids: Ids that end the sequence.
        num_run: How many of those have been run, so that their keys and values are in the cache.
        num_prompt_rows: How many rows of the prompt have been delivered.
        num_cached: How many prompt tokens an earlier sequence had run.
        grammar: Where the completion is in its grammar, if it has one; making way does not change that.
        last_token_at: When its last token was chosen; 0 before the first.
        max_batch_size, sum_batch_size, num_steps: Of the batches that gave it a row.
        scored_in: The last step that ran rows of its prompt.
        paused_since: When its outbox was first found full; ``None`` while it has room.
        contrast: The second context, if the request has one. It goes wherever this one goes; the scheduler
            knows only this one.
        leader: The one whose contrast this is.
    """

    sequence_id: int
    request: GenerationRequest
    outbox: Outbox
    stop_checker: StopChecker
    generator: torch.Generator
    stop_ids: frozenset[int]
    submitted_at: float
    token_ids: list[int]
    num_run: int = 0
    num_cached: int = 0
    num_prompt_rows: int = 0
    admitted_at: float = 0.0
    prefilled_at: float = 0.0
    last_token_at: float = 0.0
    max_batch_size: int = 0
    sum_batch_size: int = 0
    num_steps: int = 0
    scored_in: int = 0
    paused_since: float | None = None
    grammar: GrammarState | None = None
    contrast: "Sequence | None" = None
    leader: "Sequence | None" = None

    @property
    def contexts(self) -> "tuple[Sequence, ...]":
        """It and its contrast, if there is one."""
        return (self,) if self.contrast is None else (self, self.contrast)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of its prompt, or of both its contexts."""
        return sum(len(each.request.prompt_token_ids) for each in self.contexts)

    @property
    def num_left(self) -> int:
        """Tokens to run before the next one can be chosen."""
        return len(self.token_ids) - self.num_run

    @property
    def wants_prompt_rows(self) -> bool:
        """Tell whether rows of the prompt, or numbers from them, are still to be delivered."""
        request = self.request
        num_rows = len(request.prompt_token_ids) - request.prompt_start + request.next_row
        is_asked = request.prompt_row_dtype is not None or request.prompt_logprobs
        is_asked = is_asked or request.contrast is not None
        return is_asked and self.num_prompt_rows < num_rows

    @property
    def next_row_place(self) -> int:
        """The first token behind which a row is wanted; all before it may come from a cache."""
        return self.request.prompt_start - 1 + self.num_prompt_rows

    @property
    def num_context_left(self) -> int:
        """Tokens to run before the first one whose row is wanted."""
        return max(0, self.next_row_place - self.num_run)

    @property
    def num_rows_left(self) -> int:
        """Tokens of the prompt whose rows are still to be run, the last one's included if it has a use."""
        request = self.request
        has_use = request.next_row or request.max_tokens != 0
        return len(request.prompt_token_ids) - self.next_row_place - (not has_use)

    @property
    def forbidden(self) -> frozenset[int]:
        """Ids that must not come next, since it is too early to end."""
        num_completion = len(self.token_ids) - len(self.request.prompt_token_ids)
        return self.stop_ids if num_completion < self.request.min_tokens else frozenset()

    def made_contrast(self, sequence_id: int) -> "Sequence | None":
        """Return the sequence of the second context, if the request has one."""
        contrast = self.request.contrast
        if contrast is None:
            return None
        request = replace(
            self.request,
            prompt_token_ids=contrast.token_ids,
            prompt_start=contrast.start,
            prompt_logprobs=True,
            contrast=None,
        )
        return replace(
            self,
            sequence_id=sequence_id,
            request=request,
            token_ids=list(contrast.token_ids),
            leader=self,
        )

    def took_part(self, batch_size: int) -> None:
        """Book a step that gave it a row, and how many rows that gave."""
        self.max_batch_size = max(self.max_batch_size, batch_size)
        self.sum_batch_size += batch_size
        self.num_steps += 1

    def timings(self) -> Timings:
        """Return where the time went, up to now."""
        now = time.perf_counter()
        admitted = self.admitted_at or now
        prefilled = self.prefilled_at or now
        return Timings(
            queue_s=admitted - self.submitted_at,
            prefill_s=prefilled - admitted,
            decode_s=now - prefilled,
            max_batch_size=self.max_batch_size,
            mean_batch_size=self.sum_batch_size / max(1, self.num_steps),
        )
