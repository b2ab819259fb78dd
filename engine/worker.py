"""The step loop: one thread that owns the model, the KV caches and the generators.

A step admits waiting sequences, forwards the running ones, samples each group of equal settings, takes the
rows that were asked for off the device, and delivers everything in one call to the event loop.
"""

import hashlib
import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.config import EngineConfig
from engine.errors import (
    DeadlineError,
    EngineDeadError,
    EngineError,
    OutOfMemoryError,
    RequestError,
    ShuttingDownError,
    StalledReaderError,
    StepError,
)
from engine.inbox import Abort, Cancel, Command, Inbox, Stop, Submit
from engine.outbox import Event, Outbox
from engine.rows import Extracts
from engine.runner import CacheFullError, Chunk, Runner, common_prefix
from engine.sampling import SampledRow, row_fault, sample
from engine.scheduler import Scheduler
from engine.scoring import Unit, next_scores, score_events
from engine.sequence import Sequence
from engine.stats import Stats
from engine.stopping import StopChecker, Stopped
from engine.tokenizer import Tokenizer
from engine.types import Finish, FinishReason, SamplingParams, TokenEvent

logger = logging.getLogger(__name__)

OOM_REMEDIES = (
    "the device ran out of memory; lower max_tokens, send fewer requests at once (MAX_BATCH_SIZE), "
    "shorten the context (MAX_MODEL_LEN) or load smaller weights (QUANTIZATION)"
)


@dataclass(frozen=True, slots=True)
class Model:
    """What loading gives the worker."""

    runner: Runner
    tokenizer: Tokenizer
    eos_token_ids: frozenset[int]
    max_model_len: int


@dataclass(frozen=True, slots=True)
class _Chosen:
    """A sequence's next token, with the raw row (V,) that it was chosen from."""

    sequence: Sequence
    row: Tensor
    token_id: int
    support: list[int] | None


Delivery = list[tuple[Outbox, list[Event]]]

POLL_S = 0.01
"""How often a full cache is looked at while every running sequence is paused."""

CONTRAST_REMEDY = (
    "the KV cache does not hold two contexts of this length at once; raise KV_CACHE_BYTES or shorten them"
)

SHARED_PREFIX_SHARE = 0.5
"""A sequence waits for another one's prefill, if that is going to run this much of its own prompt."""


class Worker:
    """Runs steps until it is told to stop. All methods run on its own thread."""

    def __init__(
        self,
        config: EngineConfig,
        model: Model,
        inbox: Inbox,
        on_loop: Callable[[Callable[[], None]], None],
        on_step: Callable[[EngineError | None], None],
        *,
        stats: Stats,
    ) -> None:
        """Prepare an idle worker.

        Args:
            config: Sizes and time-outs.
            model: The loaded model.
            inbox: Where commands come from.
            on_loop: Runs a function on the event loop.
            on_step: Told after each step how it went, on this thread.
            stats: Where everything is counted.
        """
        self._config = config
        self._model = model
        self._inbox = inbox
        self._on_loop = on_loop
        self._on_step = on_step
        self._stats = stats
        self._scheduler = Scheduler(config.max_batch_size, config.prefill_chunk)
        self._held_bytes: dict[str, int] = {}
        self._next_sequence_id = 0
        self._is_stopping = False
        self._has_failed = False
        self._has_scored = False
        self._num_scores = 0
        self._taken: deque[Command] = deque()
        self._num_step_sequences = 0
        self._num_step_tokens = 0

    # What other threads may look at.

    @property
    def num_running(self) -> int:
        """Sequences that run."""
        return len(self._scheduler.running)

    @property
    def kv_usage(self) -> float:
        """Share of the KV cache that running sequences fill, 0 to 1; 0 where it has no limit."""
        capacity = self._model.runner.capacity_tokens
        held = sum(each.num_run for leader in list(self._scheduler.running) for each in leader.contexts)
        return held / capacity if capacity else 0.0

    # The loop.

    def run(self) -> None:
        """Serve until a :class:`engine.inbox.Stop`; whatever else ends it fails every request."""
        failure: EngineError = ShuttingDownError("the server is shutting down")
        try:
            while not self._is_stopping:
                self.turn()
        except BaseException as error:
            failure = EngineDeadError(f"the engine's worker has died of {type(error).__name__}")
            failure.__cause__ = error
            raise
        finally:
            self._fail_all(failure)

    def turn(self) -> None:
        """Take commands, admit, and run one step; wait for commands if there is nothing else to do."""
        # Kept until they are done, so that whatever ends the worker leaves nobody waiting.
        self._taken.extend(self._inbox.take(self._idle_timeout_s()))
        while self._taken:
            match self._taken[0]:
                case Submit() as command:
                    try:
                        self._accept(command)
                    except Exception as error:
                        self._refuse(command, self._as_engine_error(error))
                case Cancel(request_id):
                    self._held_bytes.pop(request_id, None)
                    for sequence in self._scheduler.find(request_id):
                        self._leave(sequence)
                        self._stats.ends[FinishReason.ABORT.value] += 1
                case Abort(request_id):
                    for sequence in self._scheduler.find(request_id):
                        self._end_early(sequence)
                case Stop():
                    self._is_stopping = True
                    return
            self._taken.popleft()
        self._drop_late()
        self._admit()
        ready = [sequence for sequence in self._scheduler.running if self._may_run(sequence)]
        if ready:
            self._num_step_sequences = self._num_step_tokens = 0
            began = time.perf_counter()
            self._step(ready)
            self._stats.step_s.add(time.perf_counter() - began)
            self._stats.step_batch.add(self._num_step_sequences)
            self._stats.step_tokens.add(self._num_step_tokens)

    def _idle_timeout_s(self) -> float | None:
        """Return how long the next wait for commands may be."""
        if any(self._may_run(sequence) for sequence in self._scheduler.running):
            return 0
        next_one = self._scheduler.next_to_admit()
        if next_one is not None and self._has_row_budget(next_one):
            # All that run are paused, and one of them may leave room in the cache at any time.
            return POLL_S if self._scheduler.running else 0
        ends = [
            each.paused_since + self._config.stall_timeout_s
            for each in self._scheduler.running
            if each.paused_since
        ]
        if self._config.deadline_s:
            ends += [each.submitted_at + self._config.deadline_s for each in self._scheduler]
        return max(0.001, min(ends) - time.perf_counter()) if ends else None

    def _may_run(self, sequence: Sequence) -> bool:
        """Tell whether a sequence's reader has room, and keep the time since when it has not."""
        if sequence.outbox.has_room():
            sequence.paused_since = None
            return True
        if sequence.paused_since is None:
            sequence.paused_since = time.perf_counter()
        return False

    # Coming.

    def _accept(self, command: Submit) -> None:
        """Make a sequence of a request."""
        request = command.request
        limit = self._model.max_model_len - len(request.prompt_token_ids)
        generator = torch.Generator(self._model.runner.device)
        if request.seed is None:
            generator.seed()
        else:
            generator.manual_seed(_mixed(request.seed))
        stop_token_ids: dict[int, str | int] = {token_id: token_id for token_id in request.stop_token_ids}
        for stop in request.stop:
            # A special token has no text where those are skipped, so its string also stops by id.
            if (token_id := self._model.tokenizer.special_token_id(stop)) is not None:
                stop_token_ids[token_id] = stop
        # Behind a grammar's end there is nothing to go on with.
        ignores_eos = request.ignore_eos and request.grammar is None
        eos_token_ids = frozenset() if ignores_eos else self._model.eos_token_ids
        sequence = Sequence(
            sequence_id=self._next_sequence_id,
            request=request,
            outbox=command.outbox,
            stop_checker=StopChecker(
                self._model.tokenizer.detokenizer(skip_special_tokens=request.skip_special_tokens),
                eos_token_ids=eos_token_ids,
                stop_token_ids=stop_token_ids,
                stop=request.stop,
                max_tokens=limit if request.max_tokens is None else request.max_tokens,
                min_tokens=request.min_tokens,
                include_stop=request.include_stop,
            ),
            generator=generator,
            stop_ids=eos_token_ids.union(stop_token_ids),
            submitted_at=command.submitted_at,
            token_ids=list(request.prompt_token_ids),
        )
        sequence.contrast = sequence.made_contrast(self._next_sequence_id + 1)
        self._next_sequence_id += 2
        if request.grammar is not None:
            sequence.grammar = request.grammar.start(request.grammar_after)
        self._scheduler.add(sequence)
        if request.max_tokens == 0 and not sequence.wants_prompt_rows:
            self._finish_empty(sequence)

    def _refuse(self, command: Submit, failure: EngineError) -> None:
        """Fail a request that could not be made a sequence."""
        logger.warning(
            "request not accepted",
            exc_info=failure.__cause__,
            extra={"request_id": command.request.request_id, "failure": str(failure)},
        )
        self._inbox.left_queue()
        self._stats.ends["error"] += 1
        self._on_loop(partial(command.outbox.fail, failure))

    def _finish_empty(self, sequence: Sequence) -> None:
        """End a sequence that was to generate nothing."""
        self._deliver([(sequence.outbox, [self._finished(sequence, FinishReason.LENGTH)])])

    def _end_early(self, sequence: Sequence) -> None:
        """End a sequence whose reader wants what there is so far."""
        finish = self._finished(sequence, FinishReason.ABORT)
        texts = sequence.stop_checker.flush()
        self._deliver([(sequence.outbox, [replace(finish, texts=texts)])])

    def _admit(self) -> None:
        """Let waiting sequences run, in their order, while there is room for them."""
        while (sequence := self._scheduler.next_to_admit()) is not None:
            if not self._has_row_budget(sequence) or self._shares_a_running_prefill(sequence):
                return
            try:
                for each in sequence.contexts:
                    # Rows that are wanted must be run, whoever has run them before.
                    each.num_run = self._model.runner.open(
                        each.sequence_id,
                        each.token_ids,
                        max_reused=each.next_row_place if sequence.wants_prompt_rows else None,
                    )
            except CacheFullError:
                self._model.runner.close(sequence.sequence_id)
                if sequence.contrast is not None and not self._scheduler.running:
                    self._fail(sequence, OutOfMemoryError(CONTRAST_REMEDY))
                return
            self._scheduler.admit()
            self._inbox.left_queue()
            self._held_bytes[sequence.request.request_id] = sequence.request.held_bytes
            if not sequence.admitted_at:
                sequence.admitted_at = time.perf_counter()
                sequence.num_cached = sum(each.num_run for each in sequence.contexts)
                self._stats.num_cached += sequence.num_cached
                self._stats.num_looked_up += sequence.num_prompt_tokens

    def _has_row_budget(self, sequence: Sequence) -> bool:
        """Tell whether the rows that a sequence may hold fit beside those that others may hold."""
        if not sequence.request.held_bytes:
            return True
        others = sum(held for name, held in self._held_bytes.items() if name != sequence.request.request_id)
        return not others or others + sequence.request.held_bytes <= self._config.row_budget_bytes

    def _shares_a_running_prefill(self, sequence: Sequence) -> bool:
        """Tell whether a running sequence is about to run a good part of this one's prompt."""
        if not self._model.runner.is_batched:
            return False
        prompt = sequence.token_ids
        if sequence.wants_prompt_rows:
            prompt = prompt[: sequence.next_row_place]
        return any(
            each.num_left > 1
            and each.paused_since is None
            and common_prefix(each.token_ids, prompt)
            >= max(each.num_run + 1, SHARED_PREFIX_SHARE * len(sequence.token_ids))
            for each in self._scheduler.running
        )

    # One step.

    def _step(self, ready: list[Sequence]) -> None:
        """Run one decode pass and one chunk of prompts; choose and deliver the tokens that follow."""
        self._has_failed = False
        rows = self._forward(ready)
        for sequence, _ in rows:
            if not sequence.prefilled_at:
                self._prefilled(sequence)
            sequence.took_part(len(rows))
        rows = self._without_faults(rows)
        masks = self._masks([sequence for sequence, _ in rows])
        groups: defaultdict[SamplingParams, list[tuple[Sequence, Tensor]]] = defaultdict(list)
        for sequence, row in rows:
            if sequence.grammar is not None and sequence.sequence_id not in masks:
                continue
            groups[sequence.request.sampling].append((sequence, row))
        chosen: list[_Chosen] = []
        for params, group in groups.items():
            try:
                chosen += self._accepted(self._sample_group(params, group, masks))
            except Exception as error:
                for sequence, _ in group:
                    self._fail(sequence, self._as_engine_error(error))
        if chosen:
            self._emit(chosen)
        if rows and not self._has_failed:
            self._on_step(None)

    def _prefilled(self, sequence: Sequence) -> None:
        """Book that a prompt has been run to its end."""
        sequence.prefilled_at = time.perf_counter()
        self._stats.num_prompt_tokens += sequence.num_prompt_tokens

    def _forward(self, ready: list[Sequence]) -> list[tuple[Sequence, Tensor]]:
        """Run the step's passes; return the rows (V,) of all sequences that have no token left to run."""
        scoring = [each for each in ready if each.wants_prompt_rows]
        decoding = [(each, 1) for each in ready if each.num_left == 1 and each not in scoring]
        prefilling = [each for each in ready if each.num_left > 1 and each not in scoring]
        rows = self._run(decoding)
        # They take turns, so that running rows wait for one chunk of prompts at most, whatever it is for.
        self._has_scored = bool(scoring) and not (prefilling and self._has_scored)
        if self._has_scored:
            return rows + self._score(scoring)
        return rows + self._run(self._scheduler.next_chunks(prefilling))

    def _run(self, chunks: list[tuple[Sequence, int]]) -> list[tuple[Sequence, Tensor]]:
        """Run so many tokens of each sequence; return the rows (V,) of those that have none left."""
        # An earlier pass of this step may have made some of them leave, or make way.
        chunks = [chunk for chunk in chunks if _leader(chunk[0]) in self._scheduler.running]
        if not chunks:
            return []
        if not self._model.runner.is_batched and len(chunks) > 1:
            return [row for chunk in chunks for row in self._run([chunk])]
        try:
            logits = self._model.runner.forward([_chunk(each, num) for each, num in chunks])  # (n, V)
        except CacheFullError:
            # The others go on now: were they to wait for the next turn, the youngest would be admitted again
            # before the cache has grown.
            self._make_way()
            return self._run(chunks)
        except Exception as error:
            return self._survivors(chunks, error)
        for sequence, num in chunks:
            sequence.num_run += num
            self._num_step_tokens += num
        self._num_step_sequences += len(chunks)
        return [
            (sequence, row)
            for (sequence, _), row in zip(chunks, logits, strict=True)
            if not sequence.num_left
        ]

    def _score(self, sequences: list[Sequence]) -> list[tuple[Sequence, Tensor]]:
        """Run rows of prompts and deliver them; return the rows (V,) behind those prompts that ended."""
        # An earlier pass of this step may have made some of them leave, or make way.
        sequences = [each for each in sequences if each in self._scheduler.running]
        if not sequences:
            return []
        units = next_scores(
            # Whoever has waited longest, so that short texts need not wait for the whole of a long one.
            sorted(sequences, key=lambda each: each.scored_in),
            max_tokens=self._config.prefill_chunk,
            vocab_size=self._model.runner.vocab_size,
            outbox_bytes=self._config.outbox_bytes,
        )
        self._num_scores += 1
        for unit in units:
            unit[0].sequence.scored_in = self._num_scores
        if units[0][0].keep:
            return self._run_units(units)
        return self._run([(chunk.sequence, chunk.num) for unit in units for chunk in unit])

    def _run_units(self, units: list[Unit]) -> list[tuple[Sequence, Tensor]]:
        """Run rows of prompts in one pass; deliver them, and return the rows behind the prompts' ends."""
        units = [unit for unit in units if _leader(unit[0].sequence) in self._scheduler.running]
        if not units:
            return []
        chunks = [chunk for unit in units for chunk in unit]
        try:
            tensors = iter(
                self._model.runner.forward_rows(
                    [_chunk(each.sequence, each.num) for each in chunks], [each.keep for each in chunks]
                )
            )  # (keep, V) each
        except CacheFullError:
            self._make_way()
            return self._run_units(units)
        except Exception as error:
            failure = self._as_engine_error(error)
            if isinstance(failure, OutOfMemoryError) or len(units) == 1:
                self._fail(units[-1][0].sequence, failure)
                return []
            # A pass that failed has left the cache as it was, so each can be tried alone.
            return [row for unit in units for row in self._run_units([unit])]
        for each in chunks:
            each.sequence.num_run += each.num
            self._num_step_tokens += each.num
        self._num_step_sequences += len(chunks)
        return self._deliver_scores([(unit[0].sequence, [next(tensors) for _ in unit]) for unit in units])

    def _deliver_scores(self, scored: list[tuple[Sequence, list[Tensor]]]) -> list[tuple[Sequence, Tensor]]:
        """Deliver rows (T, V) of prompts; return the rows (V,) behind the prompts' ends."""
        delivery: Delivery = []
        behind = []
        num_rows = sum(len(rows) for _, rows in scored)
        for sequence, rows in scored:
            sequence.took_part(num_rows)
            try:
                events, last = self._scored(sequence, rows)
            except Exception as error:
                self._fail(sequence, self._as_engine_error(error))
                continue
            if events:
                delivery.append((sequence.outbox, events))
            if last is not None:
                behind.append((sequence, last))
        self._deliver(delivery)
        if delivery and not behind and not self._has_failed:
            self._on_step(None)
        return behind

    def _scored(self, sequence: Sequence, rows: list[Tensor]) -> tuple[list[Event], Tensor | None]:
        """Return the events of a prompt's next rows (T, V), and the row (V,) behind its end if that is there.

        A sequence that was to generate nothing ends with its last row.
        """
        num_prompt = len(sequence.request.prompt_token_ids)
        num = len(rows[0])
        is_last_for_choice = not sequence.request.next_row and sequence.next_row_place + num == num_prompt
        events: list[Event] = []
        if num > is_last_for_choice:
            events += score_events(sequence, [each[: num - is_last_for_choice] for each in rows])
        for each in sequence.contexts:
            each.num_prompt_rows += len(events)
        sequence.outbox.count(sum(each.num_bytes for each in events if isinstance(each, TokenEvent)))
        self._count_rows([each.row for each in events if isinstance(each, TokenEvent)])
        if sequence.request.max_tokens == 0:
            if not sequence.wants_prompt_rows:
                self._prefilled(sequence)
                events.append(self._finished(sequence, FinishReason.LENGTH))
            return events, None
        return events, rows[0][-1] if is_last_for_choice else None

    def _make_way(self) -> None:
        """Let the youngest run again later, from its tokens, since the cache has no room for all."""
        youngest = self._scheduler.running[-1]
        if len(self._scheduler.running) == 1 and youngest.contrast is not None:
            self._fail(youngest, OutOfMemoryError(CONTRAST_REMEDY))
        else:
            self._preempt(youngest)

    def _survivors(
        self, chunks: list[tuple[Sequence, int]], error: Exception
    ) -> list[tuple[Sequence, Tensor]]:
        """Fail whom an exception in a pass concerns; return the rows of the others."""
        failure = self._as_engine_error(error)
        if isinstance(failure, OutOfMemoryError) or len(chunks) == 1:
            # The youngest makes room for the others, which start again from their tokens.
            self._fail(chunks[-1][0], failure)
            return []
        # A pass that failed has left the cache as it was, so each can be tried alone.
        return [row for chunk in chunks for row in self._run([chunk])]

    def _without_faults(self, rows: list[tuple[Sequence, Tensor]]) -> list[tuple[Sequence, Tensor]]:
        """Fail the sequences whose rows cannot be served; return the others."""
        good = []
        for sequence, row in rows:
            if fault := row_fault(row, sequence.request.row_dtype):
                self._fail(sequence, fault)
            else:
                good.append((sequence, row))
        return good

    def _masks(self, sequences: list[Sequence]) -> dict[int, NDArray[np.uint8]]:
        """Return which ids may come, by sequence id, where a grammar says so; fail who cannot go on."""
        masks = {}
        for sequence in sequences:
            if sequence.grammar is not None:
                try:
                    masks[sequence.sequence_id] = sequence.grammar.fill()
                except Exception as error:
                    self._fail(sequence, self._as_engine_error(error))
        return masks

    def _accepted(self, chosen: list[_Chosen]) -> list[_Chosen]:
        """Tell the grammars what was chosen; fail those that do not take it, and return the others."""
        taken = []
        for each in chosen:
            try:
                if each.sequence.grammar is not None:
                    each.sequence.grammar.accept(each.token_id)
            except Exception as error:
                self._fail(each.sequence, self._as_engine_error(error))
            else:
                taken.append(each)
        return taken

    def _sample_group(
        self,
        params: SamplingParams,
        group: list[tuple[Sequence, Tensor]],
        masks: Mapping[int, NDArray[np.uint8]],
    ) -> list[_Chosen]:
        """Choose the next token of sequences with equal settings."""
        token_ids, supports = sample(
            _stacked([row for _, row in group]),  # (B, V)
            params,
            [
                SampledRow(
                    sequence.token_ids,
                    len(sequence.request.prompt_token_ids),
                    sequence.generator,
                    sequence.forbidden,
                    masks.get(sequence.sequence_id),
                    sequence.request.sampling_support,
                )
                for sequence, _ in group
            ],
            num_ids=self._model.tokenizer.vocab_size,
        )
        return [
            _Chosen(sequence, row, token_ids[place], supports.get(place))
            for place, (sequence, row) in enumerate(group)
        ]

    def _emit(self, chosen: list[_Chosen]) -> None:
        """Append the chosen tokens, and deliver them with what their requests asked for."""
        try:
            extracts = Extracts(
                _stacked([each.row for each in chosen]),  # (B, V)
                [each.token_id for each in chosen],
                [each.sequence.request for each in chosen],
            )
        except Exception as error:
            failure = self._as_engine_error(error)
            for each in chosen:
                self._fail(each.sequence, failure)
            return
        delivery: Delivery = []
        now = time.perf_counter()
        self._stats.num_completion_tokens += len(chosen)
        self._count_rows(extracts.rows.values())
        for place, each in enumerate(chosen):
            sequence, token_id = each.sequence, each.token_id
            sequence.token_ids.append(token_id)
            texts, stopped = sequence.stop_checker.push(token_id)
            event = TokenEvent(
                token_id,
                texts,
                extracts.logprobs.get(place),
                extracts.top_logprobs.get(place),
                extracts.rows.get(place),
                extracts.stats.get(place),
                extracts.selected.get(place),
                rank=extracts.ranks.get(place),
                id_logprobs=extracts.id_logprobs.get(place),
                support=each.support,
            )
            sequence.outbox.count(event.num_bytes)
            if sequence.last_token_at:
                self._stats.inter_token_s.add(now - sequence.last_token_at)
            else:
                self._stats.first_token_s.add(now - sequence.submitted_at)
            sequence.last_token_at = now
            delivery.append((sequence.outbox, self._events(sequence, event, stopped)))
        self._deliver(delivery)

    def _events(self, sequence: Sequence, event: TokenEvent, stopped: Stopped | None) -> list[Event]:
        """Return what a step delivers for one sequence, and let it leave if it has ended."""
        if stopped is None:
            return [event]
        return [event, self._finished(sequence, stopped.reason, stopped.stop_reason)]

    def _count_rows(self, rows: Iterable[NDArray[np.floating] | None]) -> None:
        for row in rows:
            if row is not None:
                self._stats.num_rows += 1
                self._stats.row_bytes += row.nbytes

    def _preempt(self, sequence: Sequence) -> None:
        """Let a running sequence make way; what it has run may be lost."""
        for each in sequence.contexts:
            self._model.runner.close(each.sequence_id)
            each.num_run = 0
        self._scheduler.preempt(sequence)
        self._stats.num_preemptions += 1
        self._inbox.rejoined_queue()

    # Leaving.

    def _drop_late(self) -> None:
        """Give up the requests whose time is over, or whose readers took nothing for too long."""
        now = time.perf_counter()
        deadline_s = self._config.deadline_s
        for sequence in list(self._scheduler) if deadline_s else ():
            if now - sequence.submitted_at >= deadline_s:
                self._fail(sequence, DeadlineError(f"the request was not done after {deadline_s:g} seconds"))
        for sequence in list(self._scheduler.running):
            since = sequence.paused_since
            if (
                since is not None
                and now - since >= self._config.stall_timeout_s
                and not self._may_run(sequence)
            ):
                seconds = self._config.stall_timeout_s
                self._fail(sequence, StalledReaderError(f"nothing was read for {seconds:g} seconds"))

    def _leave(self, sequence: Sequence) -> None:
        """Free what a sequence holds."""
        if not self._scheduler.remove(sequence):
            self._inbox.left_queue()
        for each in sequence.contexts:
            self._model.runner.close(each.sequence_id)

    def _finished(
        self, sequence: Sequence, reason: FinishReason, stop_reason: str | int | None = None
    ) -> Finish:
        """Let a sequence leave that ends by itself or is asked to, and book it; return its last event."""
        self._leave(sequence)
        timings, stats = sequence.timings(), self._stats
        stats.ends[reason.value] += 1
        stats.queue_s.add(timings.queue_s)
        stats.prefill_s.add(timings.prefill_s)
        stats.decode_s.add(timings.decode_s)
        stats.e2e_s.add(timings.queue_s + timings.prefill_s + timings.decode_s)
        stats.prompt_tokens.add(sequence.num_prompt_tokens)
        stats.completion_tokens.add(len(sequence.token_ids) - len(sequence.request.prompt_token_ids))
        return Finish(reason, stop_reason, timings, sequence.num_cached)

    def _fail(self, sequence: Sequence, failure: EngineError) -> None:
        """End one sequence, or the one whose second context it is, with a failure."""
        sequence = _leader(sequence)
        # What is wrong with a request may quote it.
        reason = type(failure).__name__ if isinstance(failure, RequestError) else str(failure)
        logger.warning(
            "sequence failed",
            exc_info=failure.__cause__,
            extra={"request_id": sequence.request.request_id, "failure": reason},
        )
        self._leave(sequence)
        self._stats.ends["error"] += 1
        self._has_failed = True
        self._on_step(failure)
        self._on_loop(partial(sequence.outbox.fail, failure))

    def _fail_all(self, failure: EngineError) -> None:
        """End every request that waits or runs, or is still on its way to this thread."""
        outboxes = [each.outbox for each in self._scheduler]
        commands = [*self._taken, *self._inbox.close()]
        outboxes += [command.outbox for command in commands if isinstance(command, Submit)]
        self._stats.ends["error"] += len(outboxes)
        for outbox in outboxes:
            self._on_loop(partial(outbox.fail, failure))

    def _as_engine_error(self, error: Exception) -> EngineError:
        """Translate whatever a step raised."""
        if isinstance(error, EngineError):
            return error
        translated: EngineError
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            self._model.runner.recover()
            # Recovery has emptied the caches; who is not to blame starts again from its tokens.
            for sequence in list(reversed(self._scheduler.running)):
                self._preempt(sequence)
            translated = OutOfMemoryError(OOM_REMEDIES)
        else:
            translated = StepError(f"a step failed with {type(error).__name__}")
        translated.__cause__ = error
        return translated

    def _deliver(self, delivery: Delivery) -> None:
        """Hand a step's events to the event loop, in one call for the whole batch."""
        if delivery:
            self._on_loop(partial(_deliver_all, delivery))


def _leader(sequence: Sequence) -> Sequence:
    """Return the sequence that the scheduler knows."""
    return sequence.leader or sequence


def _chunk(sequence: Sequence, num: int) -> Chunk:
    """Return the next tokens of a sequence."""
    return Chunk(sequence.sequence_id, sequence.token_ids[sequence.num_run : sequence.num_run + num])


def _stacked(rows: list[Tensor]) -> Tensor:
    """Return rows (V,) as one tensor (B, V); a single one is not copied."""
    return rows[0][None] if len(rows) == 1 else torch.stack(rows)


def _mixed(seed: int) -> int:
    """Return a seed in which every bit counts: torch's generator on the CPU looks at the low half only."""
    digest = hashlib.blake2b(seed.to_bytes(8, "little", signed=True), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _deliver_all(delivery: Delivery) -> None:
    """Put events into their outboxes; runs on the event loop."""
    for outbox, events in delivery:
        try:
            outbox.deliver(events)
        except Exception as error:
            # Its neighbours in the batch must not miss theirs.
            logger.error("delivery failed", exc_info=error)
            outbox.fail(StepError(f"delivery failed with {type(error).__name__}"))
