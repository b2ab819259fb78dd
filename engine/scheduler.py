"""Which sequences wait, run and leave, and which of them run in a step. It touches no tensor and no clock."""

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as List

from engine.sequence import Sequence


class Scheduler:
    """First come, first served, among those of the same priority; lower goes first.

    A sequence that had to make way is served before those that never ran.
    """

    def __init__(self, max_batch_size: int, prefill_chunk: int) -> None:
        self._max_batch_size = max_batch_size
        self._prefill_chunk = prefill_chunk
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def __iter__(self) -> Iterator[Sequence]:
        """Give out all sequences, the running ones first."""
        yield from self.running
        yield from self.waiting

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait its turn."""
        place = len(self.waiting)
        # One that has run already keeps its place in front, whoever comes.
        while (
            place
            and self.waiting[place - 1].request.priority > sequence.request.priority
            and not self.waiting[place - 1].admitted_at
        ):
            place -= 1
        self.waiting.insert(place, sequence)

    def next_to_admit(self) -> Sequence | None:
        """Return the sequence whose turn it is, if there is one and a place for it."""
        if not self.waiting:
            return None
        num_places = sum(len(each.contexts) for each in self.running) + len(self.waiting[0].contexts)
        return self.waiting[0] if num_places <= self._max_batch_size else None

    def admit(self) -> None:
        """Let the sequence whose turn it is run."""
        self.running.append(self.waiting.popleft())

    def preempt(self, sequence: Sequence) -> None:
        """Let a running sequence wait again, in front."""
        self.running.remove(sequence)
        self.waiting.appendleft(sequence)

    def remove(self, sequence: Sequence) -> bool:
        """Drop a sequence; tell whether it had been running."""
        if sequence in self.running:
            self.running.remove(sequence)
            return True
        self.waiting.remove(sequence)
        return False

    def find(self, request_id: str) -> list[Sequence]:
        """Return the sequences of a request that have not left yet."""
        return [each for each in self if each.request.request_id == request_id]

    def next_chunks(self, sequences: List[Sequence]) -> list[tuple[Sequence, int]]:
        """Return whose prompts to run next, each with how many tokens of it.

        The first one may fill the chunk alone. Others join it while the padded batch is no larger than a
        chunk, so that running rows never wait for more.
        """
        chosen: list[tuple[Sequence, int]] = []
        longest = 0
        for sequence in sequences:
            num = min(sequence.num_left, self._prefill_chunk)
            longest = max(longest, num)
            if chosen and (len(chosen) + 1) * longest > self._prefill_chunk:
                break
            chosen.append((sequence, num))
        return chosen
