"""One prompt and its completion inside the engine: state of the worker thread, never shared."""

import time
from dataclasses import dataclass

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
        paused_since: When its outbox was first found full; ``None`` while it has room.
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
    max_batch_size: int = 0
    paused_since: float | None = None
    grammar: GrammarState | None = None

    @property
    def num_left(self) -> int:
        """Tokens to run before the next one can be chosen."""
        return len(self.token_ids) - self.num_run

    @property
    def wants_prompt_rows(self) -> bool:
        """Tell whether rows of the prompt, or numbers from them, are still to be delivered."""
        num_rows = len(self.request.prompt_token_ids) - 1
        is_asked = self.request.prompt_row_dtype is not None or self.request.prompt_logprobs
        return is_asked and self.num_prompt_rows < num_rows

    @property
    def forbidden(self) -> frozenset[int]:
        """Ids that must not come next, since it is too early to end."""
        num_completion = len(self.token_ids) - len(self.request.prompt_token_ids)
        return self.stop_ids if num_completion < self.request.min_tokens else frozenset()

    def timings(self) -> Timings:
        """Return where the time went, up to now."""
        now = time.perf_counter()
        admitted = self.admitted_at or now
        prefilled = self.prefilled_at or now
        return Timings(
            queue_s=admitted - self.submitted_at,
            prefill_s=prefilled - admitted,
            decode_s=now - prefilled,
            batch_size=self.max_batch_size,
        )
