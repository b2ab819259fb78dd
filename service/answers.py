"""Writers of an answer: they submit, follow the events, and send JSON or an Arrow stream.

Each is an ASGI application of its own, since only that sees a client leave and can abort a connection.
Whatever ends it, the request leaves the engine.
"""

import asyncio
import logging
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, ClassVar

import msgspec
import numpy as np
from litestar.types import Receive, Scope, Send
from msgspec import structs
from numpy.typing import NDArray

from engine.engine import Engine
from engine.errors import EngineError
from engine.outbox import Outbox
from engine.types import Finish, GenerationRequest
from schemas.arrow import MEDIA_TYPE
from schemas.logits import LogitsBlock, LogitsEncoding
from service import telemetry
from service.arrow import RowWriter
from service.convert import ChatAnswer, Plan
from service.errors import encode_error

logger = logging.getLogger(__name__)

FAREWELL_S = 2.0
"""Seconds in which a failed answer must reach its client, before the connection is cut."""


class GenerationAnswer(ABC):
    """Runs one generation for one connection."""

    keeps_rows: ClassVar[bool]

    def __init__(self, engine: Engine, plan: Plan, request: GenerationRequest) -> None:
        self._engine = engine
        self._plan = plan
        self._request = request
        self._outcome = "answered"
        self._answer = ChatAnswer(plan, engine.tokenizer, keeps_rows=self.keeps_rows)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the connection until the answer is out or the client has left.

        Raises:
            EngineError: The request failed before the first byte; the app answers it with its status.
        """
        outbox = self._engine.submit(self._request)
        writing = asyncio.ensure_future(self._write(outbox, send))
        leaving = asyncio.ensure_future(_disconnected(receive))
        failing = asyncio.ensure_future(outbox.failed.wait())
        try:
            await asyncio.wait((writing, leaving, failing), return_when=asyncio.FIRST_COMPLETED)
            if failing.done() and not leaving.done():
                # The writer tells the client, unless it waits for a reader that takes nothing.
                await asyncio.wait(
                    (writing, leaving), timeout=FAREWELL_S, return_when=asyncio.FIRST_COMPLETED
                )
            if writing.done():
                try:
                    writing.result()
                except TimeoutError:
                    self._cut(scope)
            elif leaving.done():
                self._outcome = "client_left"
            else:
                self._cut(scope)
        finally:
            # Here and not in the writer, since a writer that never started would clean up nothing.
            self._engine.cancel(self._request.request_id)
            tasks = (writing, leaving, failing)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._note(scope)

    def _cut(self, scope: Scope) -> None:
        """Give up a client that takes nothing."""
        self._outcome = "stalled"
        abort: Callable[[], None] = scope["state"]["abort"]
        abort()

    async def _send(self, send: Send, message: Any) -> None:
        """Send a part of the answer.

        Raises:
            TimeoutError: The client took nothing for as long as a reader may stall.
        """
        async with asyncio.timeout(self._engine.config.stall_timeout_s):
            await send(message)

    async def _start(self, send: Send, media_type: str, **headers: str) -> None:
        """Send the head of the answer."""
        named = {"content-type": media_type, "vary": "accept", **headers}
        raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in named.items()]
        await self._send(send, {"type": "http.response.start", "status": 200, "headers": raw})

    async def _send_piece(self, send: Send, piece: bytes | memoryview, *, is_last: bool = False) -> None:
        """Send a part of the body."""
        await self._send(send, {"type": "http.response.body", "body": piece, "more_body": not is_last})

    @abstractmethod
    async def _write(self, outbox: Outbox, send: Send) -> None:
        """Send the whole answer."""

    async def _follow(self, outbox: Outbox) -> AsyncIterator[list[object]]:
        """Give out events as they come, until the last one."""
        while self._answer.finish is None:
            events = await outbox.take()
            self._answer.add(events)
            yield list(events)

    def _note(self, scope: Scope) -> None:
        finish = self._answer.finish
        telemetry.note(
            scope,
            outcome=self._outcome,
            prompt_tokens=len(self._plan.prompt_token_ids),
            completion_tokens=len(self._answer.token_ids),
        )
        if isinstance(finish, Finish):
            telemetry.note(
                scope,
                finish_reason=finish.reason.value,
                queue_s=round(finish.timings.queue_s, 6),
                prefill_s=round(finish.timings.prefill_s, 6),
                decode_s=round(finish.timings.decode_s, 6),
                batch_size=finish.timings.batch_size,
            )


async def _disconnected(receive: Receive) -> None:
    """Return once the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


class JsonAnswer(GenerationAnswer):
    """One JSON body, once everything is generated."""

    keeps_rows = True

    async def _write(self, outbox: Outbox, send: Send) -> None:
        async for _ in self._follow(outbox):
            pass
        completion = self._answer.completion()
        if not self._plan.wants_rows:
            body = msgspec.json.encode(completion)
            await self._start(send, "application/json", content_length=str(len(body)))
            await self._send_piece(send, body, is_last=True)
            return
        # The rows can be a gigabyte of text. Encoded one at a time, they never stop the event loop for long,
        # and never exist as text all at once.
        mark = f'"{uuid.uuid4().hex}"'.encode()
        block = LogitsBlock(
            encoding=self._plan.encoding,
            dtype="float16" if self._plan.encoding == "b64_fp16" else "float32",
            shape=(len(self._answer.rows), self._plan.info.vocab_size),
            data=msgspec.Raw(mark),
        )
        choices = [structs.replace(completion.choices[0], logits=block)]
        head, _, tail = msgspec.json.encode(structs.replace(completion, choices=choices)).partition(mark)
        await self._start(send, "application/json")
        await self._send_piece(send, head + b"[")
        for piece in _encoded_rows(self._answer.rows, self._plan.encoding):
            await self._send_piece(send, piece)
            # A send to a fast reader does not suspend, and others want the loop too.
            await asyncio.sleep(0)
        await self._send_piece(send, b"]" + tail, is_last=True)


def _encoded_rows(rows: list[NDArray[np.floating]], encoding: LogitsEncoding) -> Iterator[bytes]:
    """Return each row as JSON, with the comma before it."""
    for place, row in enumerate(rows):
        comma = b"," if place else b""
        value = row.tolist() if encoding == "json" else row.data.cast("B")
        yield comma + msgspec.json.encode(value)


class ArrowAnswer(GenerationAnswer):
    """An Arrow IPC stream; every batch leaves as soon as its tokens are there."""

    keeps_rows = False

    async def _write(self, outbox: Outbox, send: Send) -> None:
        writer = RowWriter(self._plan, self._engine.tokenizer)
        has_started = False
        try:
            async for events in self._follow(outbox):
                if not has_started:
                    # Not earlier: until the first row is there, a failure still has its own status.
                    await self._start(send, MEDIA_TYPE, cache_control="no-cache", x_accel_buffering="no")
                    has_started = True
                for piece in writer.write(events):  # type: ignore[arg-type]
                    await self._send_piece(send, piece)
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
        for piece in writer.end(self._answer.completion(num_rows=[writer.num_rows])):
            await self._send_piece(send, piece)
        await self._send_piece(send, b"", is_last=True)
