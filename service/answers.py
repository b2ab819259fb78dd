"""Writers of an answer: they submit, follow the events, and send JSON or an Arrow stream.

Each is an ASGI application of its own, since only that sees a client leave and can abort a connection.
Whatever ends it, the request leaves the engine.
"""

import asyncio
import logging
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
from engine.errors import EngineError
from engine.outbox import Event, Outbox
from engine.types import GenerationRequest
from schemas.arrow import MEDIA_TYPE
from schemas.logits import LogitsBlock, LogitsEncoding, SelectedLogits
from service import telemetry
from service.arrow import RowWriter
from service.convert import Choice, Plan, chat_completion
from service.errors import encode_error
from service.metrics import Metrics

logger = logging.getLogger(__name__)

FAREWELL_S = 2.0
"""Seconds in which a failed answer must reach its client, before the connection is cut."""


class GenerationAnswer(ABC):
    """Runs one generation for one connection."""

    keeps_rows: ClassVar[bool]

    def __init__(
        self, engine: Engine, metrics: Metrics, plan: Plan, requests: Sequence[GenerationRequest]
    ) -> None:
        """Prepare an answer.

        Args:
            engine: Where the requests go.
            metrics: Where the answer is counted.
            plan: What to answer.
            requests: One per choice.
        """
        self._engine = engine
        self._metrics = metrics
        self._plan = plan
        self._requests = requests
        self._outcome = "answered"
        self._sending_since: float | None = None
        self._choices = [
            Choice(place, plan, engine.tokenizer, keeps_rows=self.keeps_rows)
            for place in range(len(requests))
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the connection until the answer is out or the client has left.

        Raises:
            EngineError: The request failed before the first byte; the app answers it with its status.
        """
        tasks: list[asyncio.Future[Any]] = []
        try:
            outboxes = [self._engine.submit(request) for request in self._requests]
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
            elif leaving.done():
                self._outcome = "client_left"
            else:
                self._cut(scope)
        except EngineError:
            self._outcome = "failed"
            raise
        finally:
            # Here and not in the writer, since a writer that never started would clean up nothing.
            for request in self._requests:
                self._engine.cancel(request.request_id)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._note(scope)

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

    async def _follow(self, outboxes: Sequence[Outbox]) -> AsyncIterator[tuple[int, list[Event]]]:
        """Give out the choices' events as they come, until the last one of each."""
        if len(outboxes) == 1:
            # The usual case needs no tasks, which cost as much as all else that is done for a row here.
            while self._choices[0].finish is None:
                events = await outboxes[0].take()
                self._choices[0].add(events)
                yield 0, events
            return
        reading = {asyncio.ensure_future(outbox.take()): place for place, outbox in enumerate(outboxes)}
        try:
            while reading:
                ready, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
                for task in ready:
                    place = reading.pop(task)
                    events = task.result()
                    choice = self._choices[place]
                    choice.add(events)
                    yield place, events
                    if choice.finish is None:
                        # Not before the events are sent: the next take books them as read.
                        reading[asyncio.ensure_future(outboxes[place].take())] = place
        finally:
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)

    def _note(self, scope: Scope) -> None:
        finishes = [each.finish for each in self._choices if each.finish is not None]
        for choice in self._choices:
            if choice.finish is not None:
                self._metrics.finished(len(self._plan.prompt_token_ids), len(choice.token_ids), choice.finish)
        num_rows = sum(choice.num_rows for choice in self._choices)
        num_bytes = sum(choice.num_row_bytes for choice in self._choices)
        self._metrics.answered(self._outcome, num_rows, num_bytes)
        telemetry.note(
            scope,
            outcome=self._outcome,
            prompt_tokens=len(self._plan.prompt_token_ids),
            completion_tokens=sum(len(each.token_ids) for each in self._choices),
        )
        if finishes:
            telemetry.note(
                scope,
                finish_reason=finishes[0].reason.value,
                cached_tokens=finishes[0].num_cached,
                queue_s=round(finishes[0].timings.queue_s, 6),
                prefill_s=round(finishes[0].timings.prefill_s, 6),
                decode_s=round(max(each.timings.decode_s for each in finishes), 6),
                batch_size=max(each.timings.batch_size for each in finishes),
            )


async def _disconnected(receive: Receive) -> None:
    """Return once the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


class JsonAnswer(GenerationAnswer):
    """One JSON body, once everything is generated."""

    keeps_rows = True

    async def _write(self, outboxes: Sequence[Outbox], send: Send) -> None:
        async for _ in self._follow(outboxes):
            pass
        completion = chat_completion(self._plan, self._choices)
        if self._plan.row_dtype is None and not self._plan.logit_token_ids:
            body = msgspec.json.encode(completion)
            await self._start(send, "application/json", content_length=str(len(body)))
            await self._send_piece(send, body, is_last=True)
            return
        # The rows can be a gigabyte of text. Encoded one at a time, they never stop the event loop for long,
        # and never exist as text all at once.
        mark = f'"{uuid.uuid4().hex}"'.encode()
        blocks: list[Iterator[bytes]] = []
        encoding = self._plan.encoding
        if self._plan.logit_token_ids:
            blocks += [_encoded(choice.selected) for choice in self._choices]
            selected = SelectedLogits(token_ids=list(self._plan.logit_token_ids), values=msgspec.Raw(mark))
            choices = [structs.replace(wire, selected_logits=selected) for wire in completion.choices]
            completion = structs.replace(completion, choices=choices)
        if self._plan.wants_rows:
            blocks += [_encoded_rows(choice.rows, encoding) for choice in self._choices]
            choices = [
                structs.replace(wire, logits=self._block(choice.rows, mark))
                for wire, choice in zip(completion.choices, self._choices, strict=True)
            ]
            completion = structs.replace(completion, choices=choices)
        if self._plan.wants_prompt_rows:
            blocks.append(_encoded_rows(self._choices[0].prompt_rows, encoding))
            block = self._block(self._choices[0].prompt_rows, mark)
            completion = structs.replace(completion, prompt_logits=block)
        head, *tails = msgspec.json.encode(completion).split(mark)
        await self._start(send, "application/json")
        await self._send_piece(send, head)
        for pieces, tail in zip(blocks, tails, strict=True):
            await self._send_piece(send, b"[")
            for piece in pieces:
                await self._send_piece(send, piece)
                # A send to a fast reader does not suspend, and others want the loop too.
                await asyncio.sleep(0)
            await self._send_piece(send, b"]" + tail)
        await self._send_piece(send, b"", is_last=True)

    def _block(self, rows: Sequence[NDArray[np.floating]], mark: bytes) -> LogitsBlock:
        """Return a block of rows with a mark in place of the values."""
        return LogitsBlock(
            encoding=self._plan.encoding,
            dtype="float16" if self._plan.encoding == "b64_fp16" else "float32",
            shape=(len(rows), self._plan.info.vocab_size),
            data=msgspec.Raw(mark),
        )


def _encoded(values: Iterable[object]) -> Iterator[bytes]:
    """Return each value as JSON, with the comma before it."""
    for place, value in enumerate(values):
        yield (b"," if place else b"") + msgspec.json.encode(value)


def _encoded_rows(rows: list[NDArray[np.floating]], encoding: LogitsEncoding) -> Iterator[bytes]:
    """Return each row as JSON, with the comma before it."""
    return _encoded(row.tolist() if encoding == "json" else row.data.cast("B") for row in rows)


class ArrowAnswer(GenerationAnswer):
    """An Arrow IPC stream; every batch leaves as soon as its tokens are there."""

    keeps_rows = False

    async def _write(self, outboxes: Sequence[Outbox], send: Send) -> None:
        writer = RowWriter(self._plan, self._engine.tokenizer)
        has_started = False
        try:
            async for place, events in self._follow(outboxes):
                if not has_started:
                    # Not earlier: until the first row is there, a failure still has its own status.
                    await self._start(send, MEDIA_TYPE, cache_control="no-cache", x_accel_buffering="no")
                    has_started = True
                for piece in writer.write(place, events):
                    await self._send_piece(send, piece)
                if self._choices[place].finish is not None:
                    # It holds no rows any more, and others may be waiting for just that.
                    self._engine.cancel(self._requests[place].request_id)
        except EngineError as error:
            if not has_started:
                raise
            self._outcome = "failed"
            logger.warning("stream failed", extra={"id": self._plan.id, "failure": str(error)})
            for piece in writer.fail(encode_error(error)):
                await self._send_piece(send, piece)
            # An answer that returns without its last chunk makes the server abort the connection, so no
            # client takes the rows that it has for all there are.
            return
        for piece in writer.end(chat_completion(self._plan, self._choices, num_rows=writer.num_rows)):
            await self._send_piece(send, piece)
        await self._send_piece(send, b"", is_last=True)
