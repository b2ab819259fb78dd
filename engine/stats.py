"""What the worker has done since its start, as plain numbers.

Each is written by one thread only, mostly the worker's, and read by others without a lock: a reader may see
the numbers of a step half booked, and never a wrong one. It knows no system that collects them.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 150, 600, 3600)
"""From a step of a tiny model to a long wait."""

STEP_SECONDS = (
    0.0005,
    0.001,
    0.002,
    0.005,
    0.01,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.15,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
)
TOKENS = tuple(scale * 10**power for power in range(6) for scale in (1, 2, 5))
STEP_TOKENS = tuple(2**power for power in range(15))
SEQUENCES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)


class Tally:
    """How many values fell into which range.

    Attributes:
        bounds: Upper bounds of the ranges, ascending; each belongs to its range.
        counts: Values in each range, and last those above all bounds.
        total: Sum of all values.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Book a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[int]:
        """Return how many values are at most each bound, and last how many there are."""
        return list(accumulate(self.counts))


class Stats:
    """Counts of a worker.

    Attributes:
        step_s: Seconds of a step, with everything that it does for its sequences.
        step_batch: Sequences that a step ran.
        step_tokens: Tokens that a step ran.
        inter_token_s: Seconds from one token of a sequence to its next.
        first_token_s: Seconds from a request to its first token.
        e2e_s: Seconds from a request to its end.
        queue_s, prefill_s, decode_s: Their parts. These four, and the next two, of those that end by
            themselves or are asked to.
        prompt_tokens, completion_tokens: Of a sequence.
        num_prompt_tokens: Whose prompts have been run, or were found in the cache.
        num_completion_tokens: Generated.
        num_looked_up, num_cached: Prompt tokens looked for in the cache, and found there.
        num_rows, row_bytes: Whole rows that left the device.
        num_preemptions: Running sequences that had to make way.
        num_refused: Requests that found the queue full; written by the callers' thread.
        ends: Sequences by how they ended: a finish reason, ``abort`` also for those whose reader has left,
            or ``error``.
    """

    def __init__(self) -> None:
        self.step_s = Tally(STEP_SECONDS)
        self.step_batch = Tally(SEQUENCES)
        self.step_tokens = Tally(STEP_TOKENS)
        self.inter_token_s = Tally(STEP_SECONDS)
        self.first_token_s = Tally(SECONDS)
        self.e2e_s = Tally(SECONDS)
        self.queue_s = Tally(SECONDS)
        self.prefill_s = Tally(SECONDS)
        self.decode_s = Tally(SECONDS)
        self.prompt_tokens = Tally(TOKENS)
        self.completion_tokens = Tally(TOKENS)
        self.num_prompt_tokens = 0
        self.num_completion_tokens = 0
        self.num_looked_up = 0
        self.num_cached = 0
        self.num_rows = 0
        self.row_bytes = 0
        self.num_preemptions = 0
        self.num_refused = 0
        self.ends: Counter[str] = Counter({"stop": 0, "length": 0, "abort": 0, "error": 0})
