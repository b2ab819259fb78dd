"""Which sequences wait, run and leave. Pure policy: it touches no tensor and no clock."""

from collections import deque

from engine.sequence import Sequence


class Scheduler:
    """First come, first served, up to a number of running sequences."""

    def __init__(self, max_batch_size: int) -> None:
        self._max_batch_size = max_batch_size
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    @property
    def has_work(self) -> bool:
        """Tell whether any sequence waits or runs."""
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait its turn."""
        self.waiting.append(sequence)

    def admit(self) -> list[Sequence]:
        """Move as many waiting sequences to the running ones as there are places; return those."""
        admitted = []
        while self.waiting and len(self.running) < self._max_batch_size:
            sequence = self.waiting.popleft()
            self.running.append(sequence)
            admitted.append(sequence)
        return admitted

    def remove(self, sequence: Sequence) -> bool:
        """Drop a sequence that waits or runs; tell whether it had been running."""
        if sequence in self.running:
            self.running.remove(sequence)
            return True
        self.waiting.remove(sequence)
        return False

    def find(self, request_id: str) -> list[Sequence]:
        """Return the sequences of a request that have not left yet."""
        return [each for each in (*self.waiting, *self.running) if each.request.request_id == request_id]
