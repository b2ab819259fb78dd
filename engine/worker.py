"""The step loop: one thread that owns the model, the KV caches and the generators.

A step admits waiting sequences, forwards the running ones, samples each group of equal settings, takes the
rows that were asked for off the device, and delivers everything in one call to the event loop.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.config import EngineConfig
from engine.errors import (
    EngineDeadError,
    EngineError,
    OutOfMemoryError,
    ShuttingDownError,
    StalledReaderError,
    StepError,
)
from engine.inbox import Cancel, Inbox, Stop, Submit
from engine.outbox import Event, Outbox
from engine.runner import Runner
from engine.sampling import raw_logprobs, row_fault, sample, top_logprobs
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.stopping import StopChecker, Stopped
from engine.tokenizer import Tokenizer
from engine.types import Finish, FinishReason, RowDtype, SamplingParams, TokenEvent

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


Delivery = list[tuple[Outbox, list[Event]]]


class Worker:
    """Runs steps until it is told to stop. All methods run on its own thread."""

    def __init__(
        self,
        config: EngineConfig,
        model: Model,
        inbox: Inbox,
        on_loop: Callable[[Callable[[], None]], None],
        on_step: Callable[[EngineError | None], None],
    ) -> None:
        """Prepare an idle worker.

        Args:
            config: Sizes and time-outs.
            model: The loaded model.
            inbox: Where commands come from.
            on_loop: Runs a function on the event loop.
            on_step: Told after each step how it went, on this thread.
        """
        self._config = config
        self._model = model
        self._inbox = inbox
        self._on_loop = on_loop
        self._on_step = on_step
        self._scheduler = Scheduler(config.max_batch_size)
        self._next_sequence_id = 0
        self._is_stopping = False

    def run(self) -> None:
        """Serve until a :class:`engine.inbox.Stop`; whatever else ends it fails every request."""
        failure: EngineError = ShuttingDownError("the server is shutting down")
        try:
            while not self._is_stopping:
                self._turn()
        except BaseException as error:
            failure = EngineDeadError(f"the engine's worker has died of {type(error).__name__}")
            failure.__cause__ = error
            raise
        finally:
            self._fail_all(failure)

    def _turn(self) -> None:
        """Take commands, admit, and run one step."""
        for command in self._inbox.take(self._idle_timeout_s()):
            match command:
                case Submit():
                    self._accept(command)
                case Cancel(request_id):
                    for sequence in self._scheduler.find(request_id):
                        self._leave(sequence)
                case Stop():
                    self._is_stopping = True
                    return
        self._drop_stalled()
        for sequence in self._scheduler.admit():
            self._inbox.left_queue()
            sequence.admitted_at = time.perf_counter()
        ready = [sequence for sequence in self._scheduler.running if self._may_run(sequence)]
        if ready:
            self._step(ready)

    def _idle_timeout_s(self) -> float | None:
        """Return how long the next wait for commands may be."""
        if self._scheduler.waiting and not self._scheduler.running:
            return 0
        if any(self._may_run(sequence) for sequence in self._scheduler.running):
            return 0
        paused = [each.paused_since for each in self._scheduler.running if each.paused_since is not None]
        if not paused:
            return None
        return max(0.001, min(paused) + self._config.stall_timeout_s - time.perf_counter())

    def _may_run(self, sequence: Sequence) -> bool:
        """Tell whether a sequence's reader has room, and keep the time since when it has not."""
        if sequence.outbox.has_room():
            sequence.paused_since = None
            return True
        if sequence.paused_since is None:
            sequence.paused_since = time.perf_counter()
        return False

    def _accept(self, command: Submit) -> None:
        """Make a sequence of a request."""
        request = command.request
        limit = self._model.max_model_len - len(request.prompt_token_ids)
        generator = torch.Generator(self._model.runner.device)
        if request.seed is None:
            generator.seed()
        else:
            generator.manual_seed(request.seed % 2**64)
        stop_token_ids: dict[int, str | int] = {token_id: token_id for token_id in request.stop_token_ids}
        for stop in request.stop:
            # A special token has no text where those are skipped, so its string also stops by id.
            if (token_id := self._model.tokenizer.special_token_id(stop)) is not None:
                stop_token_ids[token_id] = stop
        sequence = Sequence(
            sequence_id=self._next_sequence_id,
            request=request,
            outbox=command.outbox,
            stop_checker=StopChecker(
                self._model.tokenizer.detokenizer(skip_special_tokens=request.skip_special_tokens),
                eos_token_ids=frozenset() if request.ignore_eos else self._model.eos_token_ids,
                stop_token_ids=stop_token_ids,
                stop=request.stop,
                max_tokens=limit if request.max_tokens is None else request.max_tokens,
            ),
            generator=generator,
            submitted_at=command.submitted_at,
            completion_token_ids=[],
        )
        self._next_sequence_id += 1
        self._scheduler.add(sequence)
        if request.max_tokens == 0:
            finish = Finish(FinishReason.LENGTH, None, sequence.timings())
            self._leave(sequence)
            self._deliver([(sequence.outbox, [finish])])

    # One step.

    def _step(self, ready: list[Sequence]) -> None:
        """Forward, sample and deliver one token of every ready sequence."""
        rows: dict[Sequence, Tensor] = {}
        for sequence in ready:
            try:
                rows[sequence] = self._forward(sequence)
            except Exception as error:
                self._fail(sequence, self._as_engine_error(error))
        for sequence, row in list(rows.items()):
            if fault := row_fault(row, sequence.request.row_dtype):
                del rows[sequence]
                self._fail(sequence, fault)
        groups: defaultdict[SamplingParams, list[Sequence]] = defaultdict(list)
        for sequence in rows:
            groups[sequence.request.sampling].append(sequence)
        delivery: Delivery = []
        for params, group in groups.items():
            try:
                delivery += self._sample_group(params, group, rows)
            except Exception as error:
                for sequence in group:
                    self._fail(sequence, self._as_engine_error(error))
        self._deliver(delivery)
        if rows:
            self._on_step(None)

    def _forward(self, sequence: Sequence) -> Tensor:
        """Return the raw row (V,) that predicts the sequence's next token."""
        runner = self._model.runner
        if sequence.completion_token_ids:
            return runner.decode(sequence.sequence_id, sequence.completion_token_ids[-1])
        row = runner.prefill(sequence.sequence_id, sequence.request.prompt_token_ids)
        sequence.prefilled_at = time.perf_counter()
        return row

    def _sample_group(
        self, params: SamplingParams, group: list[Sequence], rows: Mapping[Sequence, Tensor]
    ) -> Delivery:
        """Choose the next token of sequences with equal settings, and make their events."""
        logits = torch.stack([rows[sequence] for sequence in group])  # (B, V)
        token_ids = sample(
            logits,
            params,
            token_ids=[sequence.token_ids for sequence in group] if params.repetition_penalty != 1 else [],
            generators=[sequence.generator for sequence in group],
            num_ids=self._model.tokenizer.vocab_size,
        )
        delivery: Delivery = []
        for sequence, row, token_id in zip(group, logits, token_ids, strict=True):
            sequence.max_batch_size = max(sequence.max_batch_size, len(rows))
            sequence.completion_token_ids.append(token_id)
            text, stopped = sequence.stop_checker.push(token_id)
            event = _token_event(sequence, row, token_id, text)
            sequence.outbox.count(event.num_bytes)
            delivery.append((sequence.outbox, self._events(sequence, event, stopped)))
        return delivery

    def _events(self, sequence: Sequence, event: TokenEvent, stopped: Stopped | None) -> list[Event]:
        """Return what a step delivers for one sequence, and let it leave if it has ended."""
        if stopped is None:
            return [event]
        self._leave(sequence)
        return [event, Finish(stopped.reason, stopped.stop_reason, sequence.timings())]

    # Leaving.

    def _drop_stalled(self) -> None:
        """Give up the requests whose readers took nothing for too long."""
        now = time.perf_counter()
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
        self._model.runner.release(sequence.sequence_id)

    def _fail(self, sequence: Sequence, failure: EngineError) -> None:
        """End one sequence with a failure."""
        logger.warning(
            "sequence failed",
            exc_info=failure.__cause__,
            extra={"request_id": sequence.request.request_id, "failure": str(failure)},
        )
        self._leave(sequence)
        self._on_loop(partial(sequence.outbox.fail, failure))
        self._on_step(failure)

    def _fail_all(self, failure: EngineError) -> None:
        """End every request that waits or runs, or is still on its way to this thread."""
        outboxes = [each.outbox for each in (*self._scheduler.running, *self._scheduler.waiting)]
        outboxes += [command.outbox for command in self._inbox.close() if isinstance(command, Submit)]
        for outbox in outboxes:
            self._on_loop(partial(outbox.fail, failure))

    def _as_engine_error(self, error: Exception) -> EngineError:
        """Translate whatever a step raised."""
        if isinstance(error, EngineError):
            return error
        translated: EngineError
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            self._model.runner.recover()
            translated = OutOfMemoryError(OOM_REMEDIES)
        else:
            translated = StepError(f"a step failed with {type(error).__name__}")
        translated.__cause__ = error
        return translated

    def _deliver(self, delivery: Delivery) -> None:
        """Hand a step's events to the event loop, in one call for the whole batch."""
        if delivery:
            self._on_loop(partial(_deliver_all, delivery))


def _deliver_all(delivery: Delivery) -> None:
    """Put events into their outboxes; runs on the event loop."""
    for outbox, events in delivery:
        outbox.deliver(events)


def _token_event(sequence: Sequence, row: Tensor, token_id: int, text: str) -> TokenEvent:
    """Make the event of one token, computing only what its request asked for."""
    request = sequence.request
    if not request.logprobs:
        return TokenEvent(token_id, text, row=_wire_row(row, request.row_dtype))
    logprobs = raw_logprobs(row[None])[0]  # (V,)
    alternatives = top_logprobs(logprobs, request.num_top_logprobs) if request.num_top_logprobs else None
    return TokenEvent(
        token_id,
        text,
        logprob=float(logprobs[token_id]),
        top_logprobs=alternatives,
        row=_wire_row(row, request.row_dtype),
    )


def _wire_row(row: Tensor, dtype: RowDtype | None) -> NDArray[np.floating] | None:
    """Cast a raw row on its device and copy it to host memory that nobody else writes."""
    if dtype is None:
        return None
    target = torch.float16 if dtype is RowDtype.FLOAT16 else torch.float32
    host: NDArray[np.floating] = row.to(target, copy=True).cpu().numpy()
    host.flags.writeable = False
    return host
