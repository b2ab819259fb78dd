"""When a sequence ends, and which of its text may be shown before that."""

from collections import deque
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
    """Turns the generated ids of one sequence into shown text, token by token, and in the end a reason.

    A token's text is given out whole, once all of it is final. The parts of a split character become final
    together: the last one has the character, the others have no text.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        eos_token_ids: Collection[int],
        stop_token_ids: Mapping[int, str | int],
        stop: Sequence[str],
        max_tokens: int,
        min_tokens: int = 0,
        include_stop: bool = False,
    ) -> None:
        """Prepare an empty completion.

        Args:
            detokenizer: A fresh one.
            eos_token_ids: Ids that end the sequence without a stop reason.
            stop_token_ids: Ids that end the sequence, each with the stop reason to report.
            stop: Strings that end the sequence; looked for in generated text only.
            max_tokens: Tokens after which it ends in any case.
            min_tokens: Tokens whose text is not searched for stop strings.
            include_stop: Show what the sequence stopped at.
        """
        self._detokenizer = detokenizer
        self._eos_token_ids = eos_token_ids
        self._stop_token_ids = stop_token_ids
        self._stop_strings = StopStrings(stop)
        self._tokens_left = max_tokens
        self._unsearched_left = min_tokens
        self._include_stop = include_stop
        self._num_split = 0
        # Tokens whose text is complete but not shown: how many share a text, and the text.
        self._units: deque[tuple[int, str]] = deque()
        self._num_shown = 0

    def push(self, token_id: int) -> tuple[tuple[str, ...], Stopped | None]:
        """Add a generated id.

        Returns:
            The texts of the tokens whose text became final, oldest first, one string a token; and the end,
            if this is it. With the end, all tokens that were left are among them.
        """
        self._tokens_left -= 1
        self._num_split += 1
        self._unsearched_left -= 1
        is_stop_id = token_id in self._stop_token_ids
        if is_stop_id or token_id in self._eos_token_ids:
            return self._end_at_token(token_id, self._stop_token_ids.get(token_id))
        piece = self._detokenizer.push(token_id)
        if not self._detokenizer.is_split:
            self._close_unit(piece)
        stop = self._search(piece)
        if stop is None and self._tokens_left == 0:
            rest = self._detokenizer.flush()
            if self._num_split:
                self._close_unit(rest)
            stop = self._search(rest)
            if stop is None:
                self._num_shown += len(self._stop_strings.flush())
                return self._release_all(), Stopped(FinishReason.LENGTH, None)
        if stop is not None:
            return self._release_all(), Stopped(FinishReason.STOP, stop)
        return self._release(), None

    def flush(self) -> tuple[str, ...]:
        """End before the next token; return the texts of the tokens that were left, one string a token."""
        if self._num_split:
            self._close_unit(self._detokenizer.flush())
        self._num_shown = sum(len(text) for _, text in self._units)
        return self._release_all()

    def _end_at_token(
        self, token_id: int, stop_reason: str | int | None
    ) -> tuple[tuple[str, ...], Stopped | None]:
        """End at an id that stands for the end; its text is not shown, unless that is wanted."""
        shown = self._detokenizer.push(token_id) if self._include_stop else ""
        shown += self._detokenizer.flush()
        if self._num_split > 1 and not self._include_stop:
            # What was left of a split character belongs to the tokens before the end.
            self._units.append((self._num_split - 1, shown))
            self._units.append((1, ""))
        else:
            self._units.append((self._num_split, shown))
        self._num_split = 0
        stop = self._search(shown)
        if stop is None:
            self._num_shown += len(self._stop_strings.flush())
        return self._release_all(), Stopped(FinishReason.STOP, stop_reason if stop is None else stop)

    def _search(self, text: str) -> str | None:
        """Look for a stop string in what came before and this; count what may be shown."""
        if self._unsearched_left >= 0:
            self._num_shown += len(text)
            return None
        shown, stop = self._stop_strings.push(text)
        self._num_shown += len(shown)
        if stop is not None and self._include_stop:
            self._num_shown += len(stop)
        return stop

    def _close_unit(self, text: str) -> None:
        """Let the tokens that came since the last complete text share this one."""
        self._units.append((self._num_split, text))
        self._num_split = 0

    def _release(self) -> tuple[str, ...]:
        """Give out the tokens whose text may be shown whole."""
        texts: list[str] = []
        while self._units and len(self._units[0][1]) <= self._num_shown:
            texts += self._take_unit()
        return tuple(texts)

    def _release_all(self) -> tuple[str, ...]:
        """Give out all tokens; text behind the end of what is shown is cut."""
        if self._num_split:
            self._close_unit("")
        texts: list[str] = []
        while self._units:
            texts += self._take_unit()
        return tuple(texts)

    def _take_unit(self) -> list[str]:
        num_tokens, text = self._units.popleft()
        shown = text[: self._num_shown]
        self._num_shown -= len(shown)
        return [""] * (num_tokens - 1) + [shown]
