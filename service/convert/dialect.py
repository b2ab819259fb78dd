"""What the endpoints' answers have in common: the parts of which a whole answer and a stream are made."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from engine.tokenizer import Tokenizer
from engine.types import TokenEvent
from schemas.chat import ChatChunk, ChatCompletion
from schemas.completions import Completion
from schemas.generate import GenerateAnswer
from schemas.logits import (
    CompletionTokensDetails,
    LogitsBlock,
    LogitsEncoding,
    PromptTokensDetails,
    SelectedLogits,
    TokenStatsBlock,
    Usage,
)
from service.convert.choice import Choice, Token
from service.convert.plan import Plan

MIN_LOGPROB = -9999.0
"""What OpenAI's clients get for a probability of zero, since JSON has no infinity."""

Whole = ChatCompletion | Completion | GenerateAnswer
Chunk = ChatChunk | Completion | GenerateAnswer


Put = Callable[[Iterator[Any]], Any]
"""Says how a long list of entries stands in a whole answer: as a list, or as a mark for one."""


class Dialect(ABC):
    """How one endpoint writes its answers. A stream's chunks add up to the whole answer."""

    def __init__(
        self, plan: Plan, tokenizer: Tokenizer, *, is_split: bool = False, hides_tokens: bool = False
    ) -> None:
        """Prepare.

        Args:
            plan: Of the answer.
            tokenizer: The model's.
            is_split: Whether a parser splits the answer into segments.
            hides_tokens: Whether some of the tokens are not given out.
        """
        self.plan = plan
        self.tokenizer = tokenizer
        self.is_split = is_split
        self.hides_tokens = hides_tokens

    @abstractmethod
    def choice(
        self, index: int, *, keeps_tokens: bool = True, keeps_rows: bool = False, waits_for_text: bool = True
    ) -> Choice:
        """Return an empty completion; see :class:`service.convert.choice.Choice`."""

    @abstractmethod
    def whole(
        self, choices: Sequence[Choice], *, num_rows: Sequence[int] | None = None, put: Put = list
    ) -> Whole:
        """Return the whole answer, without the rows themselves.

        Args:
            choices: All of them, ended.
            num_rows: Rows per choice, for Arrow's end record.
            put: How lists of entries stand in it.
        """

    @abstractmethod
    def finish_reason(self, choice: Choice) -> str:
        """Return why an ended choice has ended, in the endpoint's words."""

    @abstractmethod
    def first_chunk(self, choice: Choice, usage: Usage | None) -> Chunk | None:
        """Return what announces a choice in a stream, if anything does."""

    @abstractmethod
    def chunks(self, choice: Choice, tokens: Sequence[Token], usage: Usage | None) -> Sequence[Chunk]:
        """Return the chunks of tokens of one choice; each holds whole tokens of one segment."""

    @abstractmethod
    def last_chunk(self, choice: Choice, usage: Usage | None) -> Chunk:
        """Return what ends a choice: its finish reason."""

    @abstractmethod
    def usage_chunk(self, usage: Usage) -> Chunk:
        """Return what ends the stream if the totals are wanted."""

    def usage(self, choices: Sequence[Choice]) -> Usage:
        """Return the counts so far."""
        num_prompt, num_completion = self.plan.num_prompt_tokens, sum(each.num_tokens for each in choices)
        firsts = choices[:: self.plan.choices_per_prompt]
        num_cached = sum(each.finish.num_cached for each in firsts if each.finish is not None)
        num_reasoning = sum(each.num_reasoning_tokens for each in choices)
        return Usage(
            prompt_tokens=num_prompt,
            completion_tokens=num_completion,
            total_tokens=num_prompt + num_completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=num_cached),
            completion_tokens_details=CompletionTokensDetails(reasoning_tokens=num_reasoning)
            if self.is_split
            else UNSET,
        )

    # Parts.

    def _head(self) -> dict[str, Any]:
        """Return what stands at the head of an answer and of each of its chunks."""
        return {"id": self.plan.id, "created": self.plan.created, "model": self.plan.model}

    def _chunk_usage(self, usage: Usage | None) -> Any:
        """Return a chunk's ``usage``: the counts so far, or null if only the last ones are wanted."""
        if not self.plan.has_usage:
            return UNSET
        return usage if self.plan.has_running_usage else None

    def _stop_sequence_hit(self, choice: Choice) -> str | None:
        assert choice.finish is not None
        stop_reason = choice.finish.stop_reason
        return stop_reason if isinstance(stop_reason, str) else None

    def _numbers(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """Return a chunk's numbers of generated tokens: ids, rows, columns, statistics."""
        events = [token.event for token in tokens if token.event is not None and not token.is_prompt]
        found: dict[str, Any] = {}
        if not events:
            return found
        if self.plan.wants_token_ids:
            found["token_ids"] = [event.token_id for event in events]
        if self.plan.wants_rows:
            found["logits"] = self._block([event.row for event in events if event.row is not None])
        if self.plan.logit_token_ids:
            columns = [event.selected.tolist() for event in events if event.selected is not None]
            found["selected_logits"] = SelectedLogits(
                token_ids=list(self.plan.logit_token_ids), values=columns
            )
        if self.plan.wants_stats:
            found["token_stats"] = stats_block(events)
        return found

    def _prompt_numbers(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """Return a chunk's rows of the prompt."""
        events = [token.event for token in tokens if token.is_prompt and token.event is not None]
        rows = [event.row for event in events if event.row is not None]
        return {"prompt_logits": self._block(rows)} if rows else {}

    def _block(self, rows: Sequence[NDArray[np.floating]]) -> LogitsBlock:
        return logits_block(rows, self.plan.encoding, self.plan.info.vocab_size)

    def _token_text(self, token_id: int) -> str:
        """Return the string that stands for a token in entries."""
        return f"token_id:{token_id}" if self.plan.names_ids else self.tokenizer.token_text(token_id)

    def _stats(self, choice: Choice) -> TokenStatsBlock | Any:
        """Return the statistics of a whole choice, if they are wanted and were kept."""
        events = generated_events(choice)
        if not self.plan.wants_stats or any(event.stats is None for event in events):
            return UNSET
        return stats_block(events)


def generated_events(choice: Choice) -> list[TokenEvent]:
    """Return the engine's events of a choice's generated tokens, hidden ones left out."""
    return [token.event for token in choice.tokens if token.event is not None and not token.is_prompt]


def logits_block(
    rows: Sequence[NDArray[np.floating]], encoding: LogitsEncoding, vocab_size: int
) -> LogitsBlock:
    """Return rows as they stand in a chunk; base64 is left to the encoder."""
    data: list[Any] = [row.tolist() if encoding == "json" else row.data.cast("B") for row in rows]
    return LogitsBlock(
        encoding=encoding,
        dtype="float16" if encoding == "b64_fp16" else "float32",
        shape=(len(rows), vocab_size),
        data=data,
    )


def stats_block(events: Iterable[TokenEvent]) -> TokenStatsBlock:
    """Return the statistics of tokens."""
    stats = [event.stats for event in events if event.stats is not None]
    return TokenStatsBlock(
        entropy=[each.entropy for each in stats],
        logsumexp=[each.logsumexp for each in stats],
        rank=[each.rank for each in stats],
        margin=[each.margin for each in stats],
    )
