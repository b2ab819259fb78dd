"""The bounded hand-off of one request's events from the worker thread to the event loop.

The worker asks :meth:`Outbox.has_room` before it lets the sequence take part in a step; a full outbox
pauses its own sequence and nobody else's. Neither side ever blocks, and no lock is needed: each counter
is written by one side only.
"""

import asyncio
from collections.abc import Callable

from engine.errors import EngineError
from engine.types import Finish, TokenEvent

Event = TokenEvent | Finish


class Outbox:
    """Events of one request, in order, and at most one failure.

    Attributes:
        failed: Set once the request has failed, for readers that are busy elsewhere.
    """

    def __init__(self, limit_bytes: int, on_room: Callable[[], None]) -> None:
        self._limit_bytes = limit_bytes
        self._on_room = on_room
        self._events: list[Event] = []
        self._failure: EngineError | None = None
        self._arrived = asyncio.Event()
        self.failed = asyncio.Event()
        self._bytes_sent = 0
        self._bytes_taken = 0
        self._bytes_in_use = 0
        self._is_awaited = False

    # Worker side.

    def has_room(self) -> bool:
        """Tell whether one more row may be sent; if not, ask to be told when it may."""
        if self._bytes_sent - self._bytes_taken < self._limit_bytes:
            return True
        # The reader may take everything between the two looks, so the flag comes before the second.
        self._is_awaited = True
        return self._bytes_sent - self._bytes_taken < self._limit_bytes

    def count(self, num_bytes: int) -> None:
        """Book bytes that are on their way; called before they are delivered."""
        self._bytes_sent += num_bytes

    # Event loop side.

    def deliver(self, events: list[Event]) -> None:
        """Append events; runs on the event loop."""
        self._events.extend(events)
        self._arrived.set()

    def fail(self, failure: EngineError) -> None:
        """End the request with a failure, behind the events that came before it."""
        if self._failure is None:
            self._failure = failure
            self._arrived.set()
            self.failed.set()

    async def take(self) -> list[Event]:
        """Wait for events, and return all that are there.

        The bytes of what it returned before count as read only now, since its reader may have been sending
        them until this call.

        Returns:
            At least one event. The last one of the request is a :class:`Finish`.

        Raises:
            EngineError: The request failed; events that came before the failure were returned earlier.
        """
        self._release()
        await self._arrived.wait()
        if not self._events:
            assert self._failure is not None
            raise self._failure
        events, self._events = self._events, []
        if self._failure is None:
            self._arrived.clear()
        self._bytes_in_use = sum(event.num_bytes for event in events if isinstance(event, TokenEvent))
        return events

    def _release(self) -> None:
        """Book what was taken before as read, and tell the worker if it waits for that."""
        self._bytes_taken += self._bytes_in_use
        self._bytes_in_use = 0
        if self._is_awaited:
            self._is_awaited = False
            self._on_room()
