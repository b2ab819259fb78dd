"""One line on how far a capture is: written over and over on a terminal, and now and then to a log."""

import shutil
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from logitwire.capture.running import Counts

TERMINAL_S, LOG_S = 0.2, 10.0
"""Seconds between two lines."""


def line(counts: Counts, num_before: int, num_all: int, elapsed_s: float) -> str:
    """Return the line.

    Args:
        counts: Of this run.
        num_before: Prompts that earlier runs have done.
        num_all: All prompts.
        elapsed_s: Seconds since this run began.
    """
    elapsed_s = max(elapsed_s, 1e-3)
    num_now = counts.num_answers + counts.num_failures
    num_left = num_all - num_before - num_now
    eta = f"ETA {_clock(num_left * elapsed_s / num_now)}" if num_now else "ETA unknown"
    return (
        f"{num_before + num_now}/{num_all} prompts, {counts.num_rows} rows, "
        f"{counts.num_rows / elapsed_s:.1f} rows/s, {counts.num_bytes / 1e6 / elapsed_s:.1f} MB/s, "
        + (eta if num_left else f"in {_clock(elapsed_s)}")
    )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Progress:
    """Writes the line from a thread of its own until it is left."""

    def __init__(self, say: Callable[[float], str]) -> None:
        """Begin.

        Args:
            say: Returns the line, given the seconds since the beginning.
        """
        self._say = say
        self._is_terminal = sys.stderr.isatty()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._begun_s = time.monotonic()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        # The last line stays.
        self._print("\n")

    def _write(self) -> None:
        while not self._ended.wait(TERMINAL_S if self._is_terminal else LOG_S):
            self._print("" if self._is_terminal else "\n")

    def _print(self, end: str) -> None:
        said = self._say(time.monotonic() - self._begun_s)
        if self._is_terminal:
            # A line that wraps could not be written over.
            said = "\r\x1b[K" + said[: shutil.get_terminal_size().columns - 1]
        print(said, end=end, file=sys.stderr, flush=True)
