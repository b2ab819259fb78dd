"""Token ids to text, one token at a time, such that the pieces join to the full decode."""

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"


class Detokenizer:
    """Decodes a growing list of ids.

    A piece is given out once the ids behind it cannot change it any more. Each id is decoded together with
    those before it, since tokenizers add or drop spaces at the start of a text, and half characters decode
    to U+FFFD until their rest arrives. The window method is the one of Hugging Face's
    text-generation-inference: ``decode(ids[start:])`` less ``decode(ids[start:known])``.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._start = 0
        self._known = 0
        self._is_split = False

    @property
    def is_split(self) -> bool:
        """Tell whether the last id left a character half decoded."""
        return self._is_split

    def push(self, token_id: int) -> str:
        """Add an id and return the text that became final, which may be empty."""
        self._ids.append(token_id)
        known = self._decode(self._ids[self._start : self._known])
        text = self._decode(self._ids[self._start :])
        self._is_split = len(text) > len(known) and text.endswith(REPLACEMENT)
        if len(text) <= len(known) or self._is_split:
            return ""
        self._start, self._known = self._known, len(self._ids)
        return text[len(known) :]

    def flush(self) -> str:
        """Return what is held back; half characters become U+FFFD."""
        known = self._decode(self._ids[self._start : self._known])
        text = self._decode(self._ids[self._start :])
        self._start = self._known = len(self._ids)
        self._is_split = False
        return text[len(known) :]
