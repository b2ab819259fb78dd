"""Writers of answers for given tokens: rows of sequences as JSON or Arrow, and divergences as JSON."""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from litestar.types import Send

from engine.engine import Engine
from engine.outbox import Outbox
from engine.segments import Segment
from engine.tokenizer import Tokenizer
from engine.types import GenerationRequest, TokenEvent
from schemas.arrow import RAGGED_FIELDS, TOP_FIELDS
from schemas.base import WireResponse
from schemas.logits import LogitsBlock, SelectedLogits
from schemas.scoring import Alternative, RaggedLogits
from service.answers import Answer, ArrowStream, Blocks, encoded, encoded_rows
from service.arrow import RowWriter
from service.convert.choice import Choice, Token
from service.convert.dialect import MIN_LOGPROB, stats_block
from service.convert.divergence import Comparison, divergence_answer
from service.convert.scoring import ScoringPlan, logits_answer
from service.metrics import Metrics
from service.negotiate import Representation

logger = logging.getLogger(__name__)


class LogitsJsonAnswer(Answer):
    """One JSON body, once all rows are there."""

    def __init__(
        self, engine: Engine, metrics: Metrics, scoring: ScoringPlan, requests: Sequence[GenerationRequest]
    ) -> None:
        self._scoring = scoring
        choices = [
            Choice(place, engine.tokenizer, keeps_rows=True, waits_for_text=False)
            for place in range(len(requests))
        ]
        super().__init__(engine, metrics, scoring.plan, choices, requests)

    async def _write(self, outboxes: Sequence[Outbox], send: Send) -> None:
        async for _ in self._follow(outboxes):
            pass
        # As in a generation's answer: what is long is encoded piece by piece, and never stops the event loop.
        blocks = Blocks()
        parts = [self._parts(blocks, choice) for choice in self._choices]
        whole = logits_answer(self._scoring, self._choices, parts=parts)
        await self._start(send, "application/json")
        for piece in blocks.filled(msgspec.json.encode(whole)):
            await self._send_piece(send, piece)
            await asyncio.sleep(0)
        await self._send_piece(send, b"", is_last=True)

    def _parts(self, blocks: Blocks, choice: Choice) -> dict[str, Any]:
        """Return the numbers of one sequence, with marks in place of the long lists."""
        plan = self._plan
        events = [token.event for token in choice.tokens if token.event is not None]
        parts: dict[str, Any] = {"logprobs": [_shown(event.logprob) for event in events]}
        if plan.num_top_logprobs:
            parts["top_logprobs"] = blocks.mark(encoded(map(_alternatives, events)))
        if plan.wants_stats:
            parts["token_stats"] = stats_block(events)
        values = encoded(event.selected.tolist() for event in events if event.selected is not None)
        if plan.logit_token_ids:
            ids = list(plan.logit_token_ids)
            parts["selected_logits"] = SelectedLogits(token_ids=ids, values=blocks.mark(values))
        elif self._scoring.columns:
            ragged = [list(each) for each in self._scoring.columns[choice.index]]
            parts["selected_logits"] = RaggedLogits(token_ids=ragged, values=blocks.mark(values))
        if plan.row_dtype is not None:
            rows = [event.row for event in events if event.row is not None]
            parts["logits"] = LogitsBlock(
                encoding=plan.encoding,
                dtype="float16" if plan.encoding == "b64_fp16" else "float32",
                shape=(len(rows), plan.info.vocab_size),
                data=blocks.mark(encoded_rows(rows, plan.encoding)),
            )
        return parts


def _shown(logprob: float | None) -> float:
    assert logprob is not None
    return max(logprob, MIN_LOGPROB)


def _alternatives(event: TokenEvent) -> list[Alternative]:
    """Return the best alternatives of one position, best first."""
    best = event.top_logprobs
    assert best is not None
    return [
        Alternative(token_id=token_id, logprob=_shown(logprob))
        for token_id, logprob in zip(best.token_ids, best.logprobs, strict=True)
    ]


class ScoreWriter(RowWriter):
    """Writes rows of given tokens: positions count from the beginning of a sequence."""

    def __init__(self, scoring: ScoringPlan, tokenizer: Tokenizer) -> None:
        self._scoring = scoring
        others = [*RAGGED_FIELDS] if scoring.columns else []
        others += TOP_FIELDS if scoring.plan.num_top_logprobs else ()
        super().__init__(scoring.plan, tokenizer, others)
        self._next_position = [given.start for given in scoring.sequences]

    def segments(self, choice: int, tokens: Sequence[Token]) -> Iterator[Token]:
        """Give out the next tokens of a sequence, each as a part of the context or of what follows it."""
        given = self._scoring.sequences[choice]
        first = self._next_position[choice]
        for position, token in enumerate(tokens, first):
            is_context = given.prompt_length is not None and position < given.prompt_length
            yield Token(token.event, None if is_context else Segment.CONTENT)

    def _next_positions(self, choice: int, tokens: Sequence[Token]) -> int:
        first = self._next_position[choice]
        self._next_position[choice] = first + len(tokens)
        return first

    def _other_columns(self, choice: int, tokens: Sequence[TokenEvent]) -> list[pa.Array]:
        columns = []
        if self._scoring.columns:
            # Positions have been counted already.
            end = self._next_position[choice] - self._scoring.sequences[choice].start
            ids = self._scoring.columns[choice][end - len(tokens) : end]
            values = [event.selected for event in tokens if event.selected is not None]
            columns += [self._ragged(0, ids, RAGGED_FIELDS), self._ragged(1, values, RAGGED_FIELDS)]
        if self._scoring.plan.num_top_logprobs:
            best = [event.top_logprobs for event in tokens if event.top_logprobs is not None]
            columns += [
                self._ragged(0, [each.token_ids for each in best], TOP_FIELDS),
                self._ragged(1, [each.logprobs for each in best], TOP_FIELDS),
            ]
        return columns

    def _ragged(self, place: int, lists: Sequence[Any], fields: Sequence[pa.Field]) -> pa.Array:
        """Return a column of lists of any length."""
        kind = fields[place].type
        dtype = kind.value_type.to_pandas_dtype()
        offsets = np.cumsum([0, *map(len, lists)], dtype=np.int32)
        flat = np.concatenate([np.asarray(each, dtype) for each in lists])
        return pa.ListArray.from_arrays(offsets, pa.array(flat, kind.value_type), type=kind)


class LogitsArrowAnswer(ArrowStream):
    """The rows of given tokens."""

    def __init__(
        self, engine: Engine, metrics: Metrics, scoring: ScoringPlan, requests: Sequence[GenerationRequest]
    ) -> None:
        self._scoring = scoring
        choices = [
            Choice(place, engine.tokenizer, keeps_tokens=False, waits_for_text=False)
            for place in range(len(requests))
        ]
        super().__init__(engine, metrics, scoring.plan, choices, requests)

    def _begin(self) -> ScoreWriter:
        return ScoreWriter(self._scoring, self._engine.tokenizer)

    async def _batches(self, writer: ScoreWriter, choice: Choice, tokens: list[Token]) -> list[memoryview]:
        finish = None if choice.finish is None else choice.finish.reason.value
        segmented = list(writer.segments(choice.index, tokens))
        if self._scoring.plan.num_top_logprobs or self._scoring.columns:
            # Lists of any length take their time.
            return await asyncio.to_thread(writer.write, choice.index, segmented, finish)
        return writer.write(choice.index, segmented, finish)

    def _whole(self, writer: RowWriter) -> WireResponse:
        return logits_answer(self._scoring, self._choices, num_rows=writer.num_rows)


class DivergenceJsonAnswer(Answer):
    """One JSON body, after up to two requests: one that generates the completion, and one that compares."""

    def __init__(self, engine: Engine, metrics: Metrics, comparison: Comparison) -> None:
        self._comparison = comparison
        requests = [
            comparison.request(comparison.completion)
            if comparison.completion is not None
            else comparison.generation
        ]
        choices = [Choice(place, engine.tokenizer, waits_for_text=False) for place in range(2)]
        super().__init__(engine, metrics, comparison.plan, choices, [each for each in requests if each])

    async def _write(self, outboxes: Sequence[Outbox], send: Send) -> None:
        generated, compared = self._choices
        (outbox,) = outboxes
        token_ids = self._comparison.completion
        if token_ids is None:
            await _gathered(outbox, generated)
            token_ids = tuple(token.event.token_id for token in generated.tokens if token.event is not None)
            request = self._comparison.request(token_ids)
            outbox = self._submit(request)
        await _gathered(outbox, compared)
        values = [token.event.divergence for token in compared.tokens if token.event is not None]
        answer = divergence_answer(
            self._comparison,
            token_ids,
            [each for each in values if each is not None],
            [compared],
            self._engine.tokenizer,
        )
        body = msgspec.json.encode(answer)
        await self._start(send, "application/json", content_length=str(len(body)))
        await self._send_piece(send, body, is_last=True)


async def _gathered(outbox: Outbox, choice: Choice) -> None:
    """Take all events of one request."""
    while choice.finish is None:
        choice.add(await outbox.take())


def logits_answer_for(form: Representation) -> type[LogitsJsonAnswer] | type[LogitsArrowAnswer]:
    """Return the writer of a form."""
    return LogitsArrowAnswer if form is Representation.ARROW else LogitsJsonAnswer
