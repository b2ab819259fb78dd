"""The text of an answer as its tokens come, for a person to read along."""

import codecs
from typing import TextIO

from logitwire.results import Row

_CONTROLS = dict.fromkeys([*range(9), 11, 12, *range(14, 32), *range(127, 160)], "\ufffd")


def harmless(text: str, stream: TextIO) -> str:
    """Return what a model said as a stream may get it: a terminal gets no control characters."""
    return text.translate(_CONTROLS) if stream.isatty() else text


class VisibleText:
    """Joins the tokens of one segment to text, and holds back what may yet be cut from it.

    Half a character waits for its other half, and what may become a stop string waits until it has or cannot.
    """

    def __init__(self, stops: list[str]) -> None:
        """Begin without text.

        Args:
            stops: Stop strings of the request.
        """
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.shown = ""

    def add(self, row: Row) -> str:
        """Return what can be shown with another token."""
        self._held += self._decoder.decode(row.token_bytes)
        return self._show(len(self._held) - self._num_unsure())

    def rest(self, text: str) -> str:
        """Return what is left to be shown of the whole text, once the server has said it."""
        return text[len(self.shown) :] if text.startswith(self.shown) else ""

    def _show(self, num: int) -> str:
        now, self._held = self._held[:num], self._held[num:]
        self.shown += now
        return now

    def _num_unsure(self) -> int:
        """Return how many characters at the end belong to a stop string, or may."""
        unsure = 0
        for stop in self._stops:
            if stop in self._held:
                unsure = max(unsure, len(self._held) - self._held.index(stop))
            sizes = range(1, min(len(stop), len(self._held) + 1))
            unsure = max([unsure, *(size for size in sizes if self._held.endswith(stop[:size]))])
        return unsure
