"""The bounded hand-off from many callers to the one worker. It refuses, and never blocks a caller."""

import threading
from collections import deque
from dataclasses import dataclass

from engine.errors import EngineDeadError, QueueFullError
from engine.outbox import Outbox
from engine.types import GenerationRequest


@dataclass(frozen=True, slots=True)
class Submit:
    """Generate this, and deliver it there."""

    request: GenerationRequest
    outbox: Outbox
    submitted_at: float


@dataclass(frozen=True, slots=True)
class Cancel:
    """Forget this request; nobody reads it any more."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Abort:
    """End this request now; its reader gets what there is so far."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Stop:
    """End the worker; what still runs fails."""


Command = Submit | Cancel | Abort | Stop


class Inbox:
    """Commands for the worker, and the count of requests that wait to run."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._commands: deque[Command] = deque()
        self._changed = threading.Condition()
        self._woken = False
        self._num_waiting = 0
        self._is_closed = False

    @property
    def num_waiting(self) -> int:
        """Requests that were submitted and do not run yet."""
        return self._num_waiting

    def submit(self, command: Submit) -> None:
        """Queue a request.

        Raises:
            QueueFullError: As many requests wait as may wait.
            EngineDeadError: Nobody takes from this inbox any more.
        """
        with self._changed:
            if self._is_closed:
                raise EngineDeadError("the engine's worker has ended")
            if self._num_waiting >= self._max_waiting:
                raise QueueFullError(f"{self._num_waiting} requests wait already, which is the limit")
            self._num_waiting += 1
            self._commands.append(command)
            self._changed.notify()

    def send(self, command: Cancel | Abort | Stop) -> None:
        """Queue a command that is never refused."""
        with self._changed:
            self._commands.append(command)
            self._changed.notify()

    def wake(self) -> None:
        """End the worker's wait, since a paused sequence may go on."""
        with self._changed:
            self._woken = True
            self._changed.notify()

    def left_queue(self) -> None:
        """Book that one request waits no longer."""
        with self._changed:
            self._num_waiting -= 1

    def rejoined_queue(self) -> None:
        """Book that a running request had to make way, and waits again."""
        with self._changed:
            self._num_waiting += 1

    def take(self, timeout_s: float | None) -> list[Command]:
        """Return all commands; wait for the first one if there is none.

        Args:
            timeout_s: Seconds to wait at most; 0 does not wait, ``None`` waits without limit.
        """
        with self._changed:
            if timeout_s != 0:
                self._changed.wait_for(lambda: self._commands or self._woken, timeout_s)
            self._woken = False
            commands = list(self._commands)
            self._commands.clear()
            return commands

    def close(self) -> list[Command]:
        """Refuse requests from now on; return the commands that nobody took."""
        with self._changed:
            self._is_closed = True
            commands = list(self._commands)
            self._commands.clear()
            return commands
