"""When a sequence ends, and which of its text may be shown before that."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from engine.detokenizer import Detokenizer
from engine.types import FinishReason


class StopStrings:
    """Finds the earliest stop string in a text that arrives in pieces.

    Text that could still become a stop string is held back. After a match nothing more is given out.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Add text.

        Returns:
            The text that may be shown, and the stop string that was met, if any. Of several that begin at
            the same character the longest is named.
        """
        if not self._stop:
            return text, None
        self._held += text
        matches = [(at, -len(stop), stop) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if matches:
            at, _, stop = min(matches)
            shown, self._held = self._held[:at], ""
            return shown, stop
        keep = max(self._overlap(stop) for stop in self._stop)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, None

    def flush(self) -> str:
        """Return the text held back, when the sequence ended otherwise."""
        held, self._held = self._held, ""
        return held

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that begins ``stop``."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)


@dataclass(frozen=True, slots=True)
class Stopped:
    """Why a sequence ended; ``stop_reason`` as in :class:`engine.types.Finish`."""

    reason: FinishReason
    stop_reason: str | int | None


class StopChecker:
    """Turns the generated ids of one sequence into shown text and, in the end, a reason."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        eos_token_ids: Collection[int],
        stop_token_ids: Mapping[int, str | int],
        stop: Sequence[str],
        max_tokens: int,
    ) -> None:
        """Prepare an empty completion.

        Args:
            detokenizer: A fresh one.
            eos_token_ids: Ids that end the sequence without a stop reason.
            stop_token_ids: Ids that end the sequence, each with the stop reason to report.
            stop: Strings that end the sequence; looked for in generated text only.
            max_tokens: Tokens after which it ends in any case.
        """
        self._detokenizer = detokenizer
        self._eos_token_ids = eos_token_ids
        self._stop_token_ids = stop_token_ids
        self._stop_strings = StopStrings(stop)
        self._tokens_left = max_tokens

    def push(self, token_id: int) -> tuple[str, Stopped | None]:
        """Add a generated id; return the text that became final and the end, if this is it."""
        self._tokens_left -= 1
        is_stop_id = token_id in self._stop_token_ids
        if is_stop_id or token_id in self._eos_token_ids:
            shown, stop = self._stop_strings.push(self._detokenizer.flush())
            if stop is not None:
                return shown, Stopped(FinishReason.STOP, stop)
            stop_reason = self._stop_token_ids[token_id] if is_stop_id else None
            return shown + self._stop_strings.flush(), Stopped(FinishReason.STOP, stop_reason)
        shown, stop = self._stop_strings.push(self._detokenizer.push(token_id))
        if stop is None and self._tokens_left == 0:
            rest, stop = self._stop_strings.push(self._detokenizer.flush())
            shown += rest
            if stop is None:
                return shown + self._stop_strings.flush(), Stopped(FinishReason.LENGTH, None)
        return shown, None if stop is None else Stopped(FinishReason.STOP, stop)
