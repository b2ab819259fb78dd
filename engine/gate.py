"""Lets a grammar start late: behind a text that the model says first, such as the end of its reasoning."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Marker:
    r"""A text behind which a grammar starts, and the tokens of a vocabulary that would run over its end.

    A token that holds the end of the text and more would give the grammar a beginning that nobody checked.
    White space does no harm there, and ``">\n\n"`` is one token in many vocabularies.

    Attributes:
        text: Its UTF-8 bytes.
        tokens: The bytes of every token.
        over: Ids of tokens that hold the text from byte k on, and more; for each k > 0.
        is_allowed: bool (32 * ceil(num_ids / 32),): what may come where no part of the text has.
    """

    text: bytes
    tokens: Sequence[bytes]
    over: Mapping[int, list[int]]
    is_allowed: NDArray[np.bool_]

    @classmethod
    def of(cls, text: bytes, tokens: Sequence[bytes], eos_token_ids: Sequence[int]) -> "Marker":
        """Look through a vocabulary once.

        Args:
            text: At least one byte.
            tokens: The bytes of every token, by id.
            eos_token_ids: Ids that may not come before the text has.
        """
        over: defaultdict[int, list[int]] = defaultdict(list)
        for token_id, token in enumerate(tokens):
            at = token.find(text)
            if at >= 0 and token[at + len(text) :].strip():
                over[0].append(token_id)
            if token and token[0] in text[1:]:
                for known in range(1, len(text)):
                    if token.startswith(text[known:]) and token[len(text) - known :].strip():
                        over[known].append(token_id)
        is_allowed = np.zeros(32 * -(-len(tokens) // 32), np.bool_)
        is_allowed[: len(tokens)] = True
        # The grammar has not been obeyed yet, so nothing may end.
        is_allowed[[*eos_token_ids, *over.pop(0, ())]] = False
        return cls(text, tokens, over, is_allowed)


class Gate:
    """Waits for a marker in the text of a sequence."""

    def __init__(self, marker: Marker) -> None:
        self._marker = marker
        self._tail = b""
        self._plain = np.packbits(marker.is_allowed, bitorder="little")

    def fill(self) -> NDArray[np.uint8]:
        """Return which ids may come next, as :meth:`GrammarState.fill` does."""
        text = self._marker.text
        over = [
            token_id
            for known, ids in self._marker.over.items()
            if self._tail.endswith(text[:known])
            for token_id in ids
        ]
        if not over:
            return self._plain
        is_allowed = self._marker.is_allowed.copy()
        is_allowed[over] = False
        return np.packbits(is_allowed, bitorder="little")

    def accept(self, token_id: int) -> bool:
        """Take a token; return whether the marker is complete with it."""
        text = self._marker.text
        seen = self._tail + self._marker.tokens[token_id]
        self._tail = seen[max(len(seen) - len(text) + 1, 0) :]
        return text in seen
