"""Writers of an answer: they submit, follow the events, and send JSON, server-sent events or an Arrow stream.

Each is an ASGI application of its own, since only that sees a client leave and can abort a connection.
Whatever ends it, the request leaves the engine.
"""

import asyncio
import logging
import re
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np
from litestar.types import Receive, Scope, Send
from msgspec import structs
from numpy.typing import NDArray

from engine.engine import Engine
from engine.errors import EngineError, StalledReaderError
from engine.outbox import Event, Outbox
from engine.types import GenerationRequest
from schemas.arrow import MEDIA_TYPE
from schemas.base import WireResponse
from schemas.errors import ErrorCode
from schemas.logits import LogitsBlock, LogitsEncoding, SelectedLogits, Usage
from service import telemetry
from service.arrow import RowWriter
from service.convert.choice import Choice, Token
from service.convert.dialect import Dialect, generated_events
from service.convert.plan import Plan
from service.errors import describe, encode_error
from service.metrics import Metrics
from service.negotiate import Representation

logger = logging.getLogger(__name__)

MAX_QUICK_ENTRIES = 500
"""Alternatives that are turned into JSON in less than a few milliseconds."""

MAX_TOKENS_AT_ONCE = 32
"""Tokens that a stream's chunk holds at most, if many are ready."""

FAREWELL_S = 2.0
"""Seconds in which a failed answer must reach its client, before the connection is cut."""


class Answer(ABC):
    """Runs the requests of one connection."""

    def __init__(
        self,
        engine: Engine,
        metrics: Metrics,
        plan: Plan,
        choices: Sequence[Choice],
        requests: Sequence[GenerationRequest],
    ) -> None:
        """Prepare an answer.

        Args:
            engine: Where the requests go.
            metrics: Where the answer is counted.
            plan: What it is to hold.
            choices: What gathers the events of each request.
            requests: As many.
        """
        self._engine = engine
        self._metrics = metrics
        self._plan = plan
        self._requests = list(requests)
        self._outcome = "answered"
        self._error_code: ErrorCode | None = None
        self._submitted: list[str] = []
        self._sending_since: float | None = None
        self._is_stalled = False
        self._choices = list(choices)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the connection until the answer is out or the client has left.

        Raises:
            EngineError: The request failed before the first byte; the app answers it with its status.
        """
        tasks: list[asyncio.Future[Any]] = []
        try:
            outboxes = [self._submit(request) for request in self._requests]
            writing = asyncio.ensure_future(self._write(outboxes, send))
            leaving = asyncio.ensure_future(_disconnected(receive))
            stalling = asyncio.ensure_future(self._stalled())
            failing = [asyncio.ensure_future(outbox.failed.wait()) for outbox in outboxes]
            tasks = [writing, leaving, stalling, *failing]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not writing.done() and not leaving.done() and not stalling.done():
                # The writer tells the client, unless it waits for a reader that takes nothing.
                await asyncio.wait(
                    (writing, leaving), timeout=FAREWELL_S, return_when=asyncio.FIRST_COMPLETED
                )
            if writing.done():
                writing.result()
            if leaving.done() and not writing.done():
                self._outcome = "client_left"
            elif self._is_stalled or not writing.done():
                self._cut(scope)
        except Exception:
            is_taken = len(self._submitted) == len(self._requests)
            self._outcome = "failed" if is_taken else "refused"
            raise
        finally:
            # Here and not in the writer, since a writer that never started would clean up nothing.
            for request_id in self._submitted:
                self._engine.cancel(request_id)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._note(scope)

    def _submit(self, request: GenerationRequest) -> Outbox:
        """Queue a request; whatever ends the answer takes it back.

        Raises:
            EngineError: The engine refuses it. Its id may be another request's, so it is not ours to cancel.
        """
        outbox = self._engine.submit(request)
        self._submitted.append(request.request_id)
        return outbox

    def _fail(self, error: EngineError) -> None:
        """Keep that the answer failed behind its head."""
        self._outcome = "failed"
        # The engine may notice first; what was written fits the kernel then, which would keep it for ever.
        self._is_stalled = isinstance(error, StalledReaderError)
        self._error_code = describe(error)[2].error.code
        logger.warning("stream failed", extra={"id": self._plan.id, "error_code": self._error_code})

    def _cut(self, scope: Scope) -> None:
        """Give up a client that takes nothing."""
        self._outcome = "stalled"
        abort: Callable[[], None] = scope["state"]["abort"]
        abort()

    async def _stalled(self) -> None:
        """Return once a part was not taken for as long as a reader may stall.

        One watch for the whole answer: a timeout of each part would cost as much as sending it.
        """
        limit_s = self._engine.config.stall_timeout_s
        left_s = limit_s
        while left_s > 0:
            await asyncio.sleep(left_s)
            since = self._sending_since
            left_s = limit_s if since is None else since + limit_s - time.monotonic()

    async def _send(self, send: Send, message: Any) -> None:
        """Send a part of the answer; returns when there is room for the next one."""
        self._sending_since = time.monotonic()
        await send(message)
        self._sending_since = None

    async def _start(self, send: Send, media_type: str, **headers: str) -> None:
        """Send the head of the answer."""
        named = {"content-type": media_type, "vary": "accept", **headers}
        raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in named.items()]
        await self._send(send, {"type": "http.response.start", "status": 200, "headers": raw})

    async def _send_piece(self, send: Send, piece: bytes | memoryview, *, is_last: bool = False) -> None:
        """Send a part of the body."""
        await self._send(send, {"type": "http.response.body", "body": piece, "more_body": not is_last})

    @abstractmethod
    async def _write(self, outboxes: Sequence[Outbox], send: Send) -> None:
        """Send the whole answer."""

    async def _follow(self, outboxes: Sequence[Outbox]) -> AsyncIterator[tuple[Choice, list[Token]]]:
        """Give out the choices' tokens as they come, until the end of each."""
        if len(outboxes) == 1:
            # The usual case needs no tasks, which cost as much as all else that is done for a row here.
            while self._choices[0].finish is None:
                events = await outboxes[0].take()
                yield self._choices[0], self._choices[0].add(events)
            return
        reading: dict[asyncio.Future[list[Event]], int] = {
            asyncio.ensure_future(outbox.take()): place for place, outbox in enumerate(outboxes)
        }
        try:
            while reading:
                ready, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
                for task in ready:
                    place = reading.pop(task)
                    choice = self._choices[place]
                    yield choice, choice.add(task.result())
                    if choice.finish is None:
                        # Not before the events are sent: the next take books them as read.
                        reading[asyncio.ensure_future(outboxes[place].take())] = place
        finally:
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)

    def _note(self, scope: Scope) -> None:
        """Count the answer, and say in the log how it went."""
        finishes = [each.finish for each in self._choices if each.finish is not None]
        self._metrics.answered(self._outcome)
        telemetry.note(
            scope,
            outcome=self._outcome,
            error_code=self._error_code,
            model=self._plan.model,
            prompt_tokens=self._plan.num_prompt_tokens,
            completion_tokens=sum(each.num_tokens for each in self._choices),
            rows=sum(choice.num_rows for choice in self._choices),
            row_bytes=sum(choice.num_row_bytes for choice in self._choices),
        )
        if finishes:
            first = finishes[0].timings
            telemetry.note(
                scope,
                finish_reason=",".join(dict.fromkeys(each.reason.value for each in finishes)),
                cached_tokens=finishes[0].num_cached,
                queue_s=round(first.queue_s, 6),
                prefill_s=round(first.prefill_s, 6),
                decode_s=round(max(each.timings.decode_s for each in finishes), 6),
                ttft_s=round(first.queue_s + first.prefill_s, 6),
                mean_batch_size=round(
                    sum(each.timings.mean_batch_size for each in finishes) / len(finishes), 2
                ),
                max_batch_size=max(each.timings.max_batch_size for each in finishes),
            )
        if scope["state"]["logs_texts"] and self._engine.tokenizer.has_text:
            # No more ids than characters are shown.
            prompts = [
                self._engine.tokenizer.decode(
                    ids[: telemetry.MAX_LOGGED_CHARACTERS], skip_special_tokens=False
                )
                for ids in self._plan.prompts[: telemetry.MAX_LOGGED_TEXTS]
            ]
            telemetry.note_texts(scope, prompts, [each.reasoning + each.content for each in self._choices])


async def _disconnected(receive: Receive) -> None:
    """Return once the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


class GenerationAnswer(Answer):
    """Runs one generation for one connection."""

    keeps_tokens: ClassVar[bool] = True
    keeps_rows: ClassVar[bool] = False
    waits_for_text: ClassVar[bool] = True

    def __init__(
        self, engine: Engine, metrics: Metrics, dialect: Dialect, requests: Sequence[GenerationRequest]
    ) -> None:
        """Prepare an answer.

        Args:
            engine: Where the requests go.
            metrics: Where the answer is counted.
            dialect: How it is written.
            requests: One per choice.
        """
        self._dialect = dialect
        choices = [
            dialect.choice(
                place,
                keeps_tokens=self.keeps_tokens,
                keeps_rows=self.keeps_rows,
                waits_for_text=self.waits_for_text,
            )
            for place in range(len(requests))
        ]
        super().__init__(engine, metrics, dialect.plan, choices, requests)


class JsonAnswer(GenerationAnswer):
    """One JSON body, once everything is generated."""

    keeps_rows = True

    async def _write(self, outboxes: Sequence[Outbox], send: Send) -> None:
        for choice in self._choices:
            choice.opening()
        async for _ in self._follow(outboxes):
            pass
        # Rows and entries can be a gigabyte of text. Encoded one at a time, they never stop the event loop
        # for long, and never exist as text all at once.
        blocks = Blocks()
        whole = self._dialect.whole(self._choices, put=lambda entries: blocks.mark(encoded(entries)))
        if self._plan.row_dtype is not None or self._plan.logit_token_ids:
            choices = [structs.replace(wire, **self._marked(blocks, wire.index)) for wire in whole.choices]
            whole = structs.replace(whole, choices=choices)
        if self._plan.wants_prompt_rows and len(self._plan.prompts) == 1:
            whole = structs.replace(whole, prompt_logits=self._rows(blocks, self._choices[0], of_prompt=True))
        pieces = blocks.filled(msgspec.json.encode(whole))
        if self._is_small():
            body = b"".join(pieces)
            await self._start(send, "application/json", content_length=str(len(body)))
            await self._send_piece(send, body, is_last=True)
            return
        await self._start(send, "application/json")
        is_wide = self._plan.width > MAX_QUICK_ENTRIES
        while (
            piece := await asyncio.to_thread(next, pieces, None) if is_wide else next(pieces, None)
        ) is not None:
            await self._send_piece(send, piece)
            # A send to a fast reader does not suspend, and others want the loop too.
            await asyncio.sleep(0)
        await self._send_piece(send, b"", is_last=True)

    def _is_small(self) -> bool:
        """Tell whether the whole answer is encoded in no time."""
        plan = self._plan
        if plan.row_dtype is not None or plan.logit_token_ids:
            return False
        num_tokens = sum(len(choice.tokens) for choice in self._choices)
        has_entries = plan.wants_entries or plan.wants_prompt_entries or plan.width
        return not has_entries or num_tokens * (1 + plan.width) <= MAX_QUICK_ENTRIES

    def _marked(self, blocks: "Blocks", index: int) -> dict[str, Any]:
        """Return the fields of one choice that hold rows, with marks in place of the values."""
        choice, plan = self._choices[index], self._plan
        fields: dict[str, Any] = {}
        if plan.logit_token_ids:
            columns = (event.selected for event in generated_events(choice) if event.selected is not None)
            mark = blocks.mark(encoded(values.tolist() for values in columns))
            fields["selected_logits"] = SelectedLogits(token_ids=list(plan.logit_token_ids), values=mark)
        if plan.wants_rows:
            fields["logits"] = self._rows(blocks, choice, of_prompt=False)
        if plan.has_prompt_rows(index) and len(plan.prompts) > 1:
            fields["prompt_logits"] = self._rows(blocks, choice, of_prompt=True)
        return fields

    def _rows(self, blocks: "Blocks", choice: Choice, *, of_prompt: bool) -> LogitsBlock:
        """Return a block of rows with a mark in place of the values."""
        tokens = (token for token in choice.tokens if token.is_prompt is of_prompt)
        rows = [
            token.event.row for token in tokens if token.event is not None and token.event.row is not None
        ]
        return LogitsBlock(
            encoding=self._plan.encoding,
            dtype="float16" if self._plan.encoding == "b64_fp16" else "float32",
            shape=(len(rows), self._plan.info.vocab_size),
            data=blocks.mark(encoded_rows(rows, self._plan.encoding)),
        )


class Blocks:
    """Lists that are encoded piece by piece; until then a mark stands for each."""

    def __init__(self) -> None:
        self._key = uuid.uuid4().hex
        self._pieces: list[Iterator[bytes]] = []

    def mark(self, pieces: Iterator[bytes]) -> msgspec.Raw:
        """Return what stands for a list, given its encoded elements with their commas."""
        self._pieces.append(pieces)
        return msgspec.Raw(f'"{self._key}-{len(self._pieces) - 1}"'.encode())

    def filled(self, body: bytes) -> Iterator[bytes]:
        """Give out a body with its lists in place of their marks."""
        parts = re.split(rf'"{self._key}-([0-9]+)"'.encode(), body)
        yield parts[0]
        for place, rest in zip(parts[1::2], parts[2::2], strict=True):
            yield b"["
            yield from self._pieces[int(place)]
            yield b"]" + rest


def encoded(values: Iterable[object]) -> Iterator[bytes]:
    """Return each value as JSON, with the comma before it."""
    for place, value in enumerate(values):
        yield (b"," if place else b"") + msgspec.json.encode(value)


def encoded_rows(rows: list[NDArray[np.floating]], encoding: LogitsEncoding) -> Iterator[bytes]:
    """Return each row as JSON, with the comma before it."""
    return encoded(row.tolist() if encoding == "json" else row.data.cast("B") for row in rows)


class EventsAnswer(GenerationAnswer):
    """Server-sent events, one a chunk, as OpenAI streams them."""

    keeps_tokens = False

    async def _write(self, outboxes: Sequence[Outbox], send: Send) -> None:
        self._has_started = False
        self._said_at = time.monotonic()
        # Before any event, since offsets into the text count from here.
        self._openings = [choice.opening() for choice in self._choices]
        following = self._follow(outboxes)
        waiting: asyncio.Future[tuple[Choice, list[Token]]] | None = None
        try:
            while True:
                if waiting is None:
                    waiting = asyncio.ensure_future(anext(following))
                silent_s = time.monotonic() - self._said_at
                await asyncio.wait((waiting,), timeout=max(0.0, self._plan.keep_alive_s - silent_s))
                if time.monotonic() - self._said_at >= self._plan.keep_alive_s:
                    # Tokens may come and yet nothing be sent, if they have no text or are hidden.
                    await self._say(send, b": keep-alive\n\n")
                if not waiting.done():
                    continue
                try:
                    choice, tokens = waiting.result()
                except StopAsyncIteration:
                    break
                waiting = None
                await self._send_tokens(send, choice, tokens)
        except EngineError as error:
            if not self._has_started:
                raise
            self._fail(error)
            await self._say(send, b"data: " + encode_error(error) + b"\n\n")
            await self._send_piece(send, b"", is_last=True)
            return
        finally:
            if waiting is not None:
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
        if self._plan.has_usage:
            await self._say(send, _event(self._dialect.usage_chunk(self._dialect.usage(self._choices))))
        await self._say(send, b"data: [DONE]\n\n")
        await self._send_piece(send, b"", is_last=True)

    async def _send_tokens(self, send: Send, choice: Choice, tokens: list[Token]) -> None:
        """Send what became final of one choice, and its end."""
        for start in range(0, len(tokens), MAX_TOKENS_AT_ONCE):
            part = tokens[start : start + MAX_TOKENS_AT_ONCE]
            usage = self._usage(len(tokens) - start - len(part))
            if len(part) * self._plan.width > MAX_QUICK_ENTRIES:
                events = await asyncio.to_thread(self._encoded, choice, part, usage)
            else:
                events = self._encoded(choice, part, usage)
            for event in events:
                await self._say(send, event)
        if choice.finish is not None:
            await self._say(send, _event(self._dialect.last_chunk(choice, self._usage())))
            # It holds no rows any more, and others may be waiting for just that.
            self._engine.cancel(self._requests[choice.index].request_id)

    def _encoded(self, choice: Choice, tokens: Sequence[Token], usage: Usage | None) -> list[bytes]:
        return [_event(chunk) for chunk in self._dialect.chunks(choice, tokens, usage)]

    def _usage(self, num_unsent: int = 0) -> Usage | None:
        """Return the counts so far, if chunks have them; without those tokens that wait to be sent."""
        if not self._plan.has_running_usage:
            return None
        usage = self._dialect.usage(self._choices)
        return structs.replace(
            usage,
            completion_tokens=usage.completion_tokens - num_unsent,
            total_tokens=usage.total_tokens - num_unsent,
        )

    async def _say(self, send: Send, event: bytes) -> None:
        """Send an event; the first one brings the head of the answer, and announces the choices.

        Not earlier: until then a failure still has its own status.
        """
        if not self._has_started:
            self._has_started = True
            await self._start(
                send, "text/event-stream; charset=utf-8", cache_control="no-cache", x_accel_buffering="no"
            )
            usage = self._usage(sum(choice.num_tokens for choice in self._choices))
            for choice, tokens in zip(self._choices, self._openings, strict=True):
                if (first := self._dialect.first_chunk(choice, usage)) is not None:
                    await self._send_piece(send, _event(first))
                for chunk in self._dialect.chunks(choice, tokens, usage):
                    await self._send_piece(send, _event(chunk))
        await self._send_piece(send, event)
        self._said_at = time.monotonic()


def _event(chunk: msgspec.Struct) -> bytes:
    """Return a chunk as a server-sent event."""
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


class ArrowStream(Answer):
    """An Arrow IPC stream; every batch leaves as soon as its rows are there."""

    @abstractmethod
    def _begin(self) -> RowWriter:
        """Return the writer of the stream; called before any event."""

    @abstractmethod
    async def _batches(self, writer: Any, choice: Choice, tokens: list[Token]) -> list[memoryview]:
        """Return what is to be sent of a choice's next tokens."""

    @abstractmethod
    def _whole(self, writer: RowWriter) -> WireResponse:
        """Return the answer without rows, for the end record."""

    async def _write(self, outboxes: Sequence[Outbox], send: Send) -> None:
        writer = self._begin()
        has_started = False
        try:
            async for choice, tokens in self._follow(outboxes):
                if not has_started:
                    # Not earlier: until the first row is there, a failure still has its own status.
                    await self._start(send, MEDIA_TYPE, cache_control="no-cache", x_accel_buffering="no")
                    has_started = True
                for piece in await self._batches(writer, choice, tokens):
                    await self._send_piece(send, piece)
                if choice.finish is not None:
                    # It holds no rows any more, and others may be waiting for just that.
                    self._engine.cancel(self._requests[choice.index].request_id)
        except EngineError as error:
            if not has_started:
                raise
            self._fail(error)
            for piece in writer.fail(encode_error(error)):
                await self._send_piece(send, piece)
            # An answer that returns without its last chunk makes the server abort the connection, so no
            # client takes the rows that it has for all there are.
            return
        # The end record may hold entries, as many as a whole answer.
        record = await asyncio.to_thread(lambda: writer.end(self._whole(writer)))
        for piece in record:
            await self._send_piece(send, piece)
        await self._send_piece(send, b"", is_last=True)


class ArrowAnswer(ArrowStream, GenerationAnswer):
    """The rows of a generation."""

    waits_for_text = False

    def _begin(self) -> RowWriter:
        for choice in self._choices:
            choice.opening()
        self._held: dict[int, list[Token]] = {}
        return RowWriter(self._plan, self._engine.tokenizer)

    async def _batches(self, writer: RowWriter, choice: Choice, tokens: list[Token]) -> list[memoryview]:
        finish = None if choice.finish is None else self._dialect.finish_reason(choice)
        return writer.write(choice.index, self._ready(choice, tokens), finish)

    def _whole(self, writer: RowWriter) -> WireResponse:
        return self._dialect.whole(self._choices, num_rows=writer.num_rows)

    def _ready(self, choice: Choice, tokens: list[Token]) -> list[Token]:
        """Return the tokens to write now: all but the last one, if it may turn out to be the last of all.

        The finish reason stands in the last row, and some choices end behind tokens that are hidden or none.
        """
        ready = self._held.pop(choice.index, []) + tokens
        if choice.finish is None and ready:
            is_scored = ready[-1].is_prompt and self._requests[choice.index].max_tokens == 0
            if self._dialect.hides_tokens or is_scored:
                self._held[choice.index] = [ready.pop()]
        return ready


def answer_for(form: Representation, *, is_stream: bool) -> type[GenerationAnswer]:
    """Return the writer of a form; an Arrow answer is a stream in any case."""
    if form is Representation.ARROW:
        return ArrowAnswer
    return EventsAnswer if is_stream else JsonAnswer
