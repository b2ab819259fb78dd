"""A connection of an event loop, which receives straight into the memory of rows."""

import asyncio
import os
from collections import deque
from typing import Any

from logitwire.arrow import Batch
from logitwire.config import Config
from logitwire.errors import APIConnectionError, APITimeoutError
from logitwire.exchange import Exchange, Exchanging

MAX_TURN_BYTES = 2**22
"""Bytes that one turn of the event loop receives for one connection, before others have theirs."""

HAS_READV = hasattr(os, "readv")

MAX_READY = 8
"""Batches that nobody has taken yet, before the connection stops reading."""


class Connection(asyncio.BufferedProtocol):
    """Carries one exchange at a time.

    The loop receives into the buffer that the exchange asks for next, so an answer is read without a task
    being woken; tasks wait for batches, or for the end.

    Attributes:
        loop: That it belongs to.
        result: Of the exchange, at its end.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, timeout_s: float) -> None:
        """Prepare.

        Args:
            loop: That it belongs to.
            timeout_s: Seconds to wait for the next bytes at most.
        """
        self.loop = loop
        self.result: Any = None
        self._timeout_s = timeout_s
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange[Any] | None = None
        self._answering: Exchanging[Any] | None = None
        self._nowhere = self._wanted = memoryview(bytearray(1))
        self._gives = False
        self._ready: deque[Batch] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self._is_paused = False
        self._active_at = 0.0
        self._watch: asyncio.TimerHandle | None = None
        # Of the socket, where it may be read past the loop.
        self._file = -1

    @property
    def is_lost(self) -> bool:
        """Tell whether the connection cannot be used any more."""
        return self._transport is None or self._transport.is_closing()

    @property
    def may_follow(self) -> bool:
        """Tell whether another exchange may follow the one that has ended."""
        return not self.is_lost and self._exchange is not None and self._exchange.may_follow

    async def converse(self, exchange: Exchange[Any], *, gives: bool) -> None:
        """Send a request, and wait for its first batch or for the end of its answer.

        Args:
            exchange: What to send, and how to read the answer.
            gives: Whether batches are given out by :meth:`take`; else there is only the end.

        Raises:
            LogitwireError: The exchange failed before its first batch.
        """
        assert self._transport is not None
        self._begin(exchange, gives=gives)
        self._transport.write(exchange.request)
        await self._something()
        if self._error is not None and not self._ready:
            raise self._error

    async def take(self) -> Batch | None:
        """Return the next batch; ``None`` at the end of the answer.

        Raises:
            LogitwireError: The answer broke off, or the server failed it.
        """
        await self._something()
        if self._ready:
            batch = self._ready.popleft()
            if self._is_paused and len(self._ready) <= MAX_READY // 2:
                assert self._transport is not None
                self._is_paused = False
                self._active_at = self.loop.time()
                self._transport.resume_reading()
            return batch
        if self._error is not None:
            raise self._error
        return None

    def abort(self) -> None:
        """Close the connection now, which ends the work at the server."""
        if self._watch is not None:
            self._watch.cancel()
        if self._transport is not None and not self.loop.is_closed():
            self._transport.abort()

    def _begin(self, exchange: Exchange[Any], *, gives: bool) -> None:
        self._exchange, self._answering, self._gives = exchange, exchange.answer(), gives
        self.result = self._error = None
        self._active_at = self.loop.time()
        self._watch = self.loop.call_later(self._timeout_s, self._check_time)
        self._step(None)

    async def _something(self) -> None:
        """Wait for a batch or the end."""
        while not self._ready and self._answering is not None:
            self._waiter = self.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _step(self, received: int | None) -> None:
        """Let the exchange go on, up to the next buffer that it wants filled."""
        if self._answering is None:
            # Nobody asked for anything.
            self.abort()
            return
        try:
            item = self._answering.send(received)
            while not isinstance(item, memoryview):
                if self._gives:
                    self._ready.append(item)
                item = self._answering.send(None)
            self._wanted = item
        except StopIteration as stop:
            self._end(stop.value, None)
        except Exception as error:  # the task that waits is to raise it, whatever it is
            self._end(None, error)
        if self._ready:
            self._wake()
            if len(self._ready) >= MAX_READY and not self._is_paused and self._answering is not None:
                assert self._transport is not None
                self._is_paused = True
                self._transport.pause_reading()

    def _end(self, result: Any, error: Exception | None) -> None:
        self.result, self._error = result, error
        self._answering, self._wanted = None, self._nowhere
        if self._watch is not None:
            self._watch.cancel()
        self._wake()

    def _fail(self, cause: Exception) -> None:
        if self._answering is not None and self._exchange is not None:
            self._answering.close()
            error = self._exchange.failure(cause)
            error.__cause__ = cause
            self._end(None, error)

    def _check_time(self) -> None:
        """Give up a server that has been silent for too long; come back later otherwise."""
        if self._is_paused:
            self._active_at = self.loop.time()
        left_s = self._active_at + self._timeout_s - self.loop.time()
        if left_s > 0:
            self._watch = self.loop.call_later(left_s, self._check_time)
            return
        self._fail(TimeoutError(f"nothing came for {self._timeout_s:g} s"))
        self.abort()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if HAS_READV and transport.get_extra_info("sslcontext") is None:
            self._file = transport.get_extra_info("socket").fileno()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the next bytes belong."""
        return self._wanted

    def buffer_updated(self, nbytes: int) -> None:
        """Go on with the bytes that came, and with what else is there: a turn of the loop costs more."""
        self._active_at = self.loop.time()
        left = MAX_TURN_BYTES
        # A buffer that was not filled says that there is no more.
        is_full = nbytes == len(self._wanted)
        self._step(nbytes)
        while is_full and left > 0 and self._may_read_on:
            try:
                got, is_full = self._read()
            except OSError:
                # There is no more, or the loop will find out why.
                return
            if not got:
                return
            left -= got
            self._step(got)

    @property
    def _may_read_on(self) -> bool:
        return self._file >= 0 and self._answering is not None and not self._is_paused

    def _read(self) -> tuple[int, bool]:
        """Read into the buffer, and what else is there into the spare one; tell whether both are full."""
        assert self._exchange is not None
        wanted, spare = self._wanted, self._exchange.spare
        buffers = (wanted,) if wanted.obj is spare.obj else (wanted, spare)
        got = os.readv(self._file, buffers)
        return got, got == sum(map(len, buffers))

    def eof_received(self) -> None:
        """Go on with the end of the connection."""
        if self._answering is not None:
            self._step(0)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail what still goes on."""
        self._file = -1
        self._fail(exc or ConnectionError("the connection was closed"))


async def connect(config: Config) -> Connection:
    """Open a connection.

    Raises:
        APIConnectionError: It cannot be opened.
    """
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(config.connect_timeout_s):
            _, connection = await loop.create_connection(
                lambda: Connection(loop, config.timeout_s), config.host, config.port, ssl=config.context
            )
    except OSError as error:
        kind = APITimeoutError if isinstance(error, TimeoutError) else APIConnectionError
        raise kind(f"no connection to {config.netloc}: {error}") from error
    return connection
