"""Which positions of two token sequences can be compared, when the tokens differ.

A row is a distribution given everything before it. Two rows at one place say the same thing about two
iterations only if both follow the same generated tokens: that is so up to and including the first position
at which the tokens differ, since the row there was computed before the choice. Behind it, each row also
follows another text. Where the sequences agree again later, the two models' views of one token can still be
set side by side, but a difference may then come from the text between as much as from the prompt. Both
kinds are told apart here; what they share is that the prompts may differ, as they do in a refinement loop.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from logitwire.metrics import Base, jsd
from logitwire.views import PickedRows, RowsLike, as_rows

Kind: TypeAlias = Literal["same prefix", "same token"]


@dataclass(frozen=True, slots=True, eq=False)
class Alignment:
    """The comparable positions of two sequences, in order.

    Attributes:
        a_positions: int64 (n,), increasing.
        b_positions: int64 (n,), increasing: ``a_positions[i]`` and ``b_positions[i]`` are comparable.
        num_same_prefix: The first so many pairs follow the same generated tokens. In the others the token
            is the same, but not all that stands before it.
    """

    a_positions: NDArray[np.int64]
    b_positions: NDArray[np.int64]
    num_same_prefix: int

    @property
    def kinds(self) -> list[Kind]:
        """What each pair has in common."""
        num = self.num_same_prefix
        return ["same prefix" if place < num else "same token" for place in range(len(self.a_positions))]

    def same_prefix(self) -> "Alignment":
        """Return the strictly comparable pairs only."""
        num = self.num_same_prefix
        return Alignment(self.a_positions[:num], self.b_positions[:num], num)

    def jsd(
        self, rows_a: RowsLike, rows_b: RowsLike, base: Base = 2, *, temperature: float = 1.0
    ) -> NDArray[np.float64]:
        """Return the Jensen-Shannon divergence of each pair, float64 (n,); see :func:`logitwire.metrics.jsd`.

        Args:
            rows_a: (T of a, V) logits.
            rows_b: (T of b, V) logits.
            base: Of the logarithm.
            temperature: Divides both before they are compared.

        Raises:
            ValueError: There are fewer rows than positions, or as for :func:`logitwire.metrics.jsd`.
        """
        a = PickedRows(as_rows(rows_a), self.a_positions)
        b = PickedRows(as_rows(rows_b), self.b_positions)
        return jsd(a, b, base, temperature=temperature)


def common_prefix(a_ids: Sequence[int], b_ids: Sequence[int]) -> int:
    """Return how many tokens two sequences have in common from the start."""
    num = 0
    for one, other in zip(a_ids, b_ids, strict=False):
        if one != other:
            break
        num += 1
    return num


def align(a_ids: Sequence[int], b_ids: Sequence[int]) -> Alignment:
    """Return which positions of two sequences are comparable.

    First come the positions 0 to p, where p is the length of the common prefix: in the pair (p, p), if both
    have it, the tokens differ and the rows are comparable nevertheless. Behind that, a longest common
    subsequence of the tokens is paired. Of several such, one is taken whose matches lie early in ``b``.

    The time is that of len(a) additions of len(b) bits, whatever the tokens are: some 10 ms for 4,096
    tokens that have little in common.
    """
    prefix = common_prefix(a_ids, b_ids)
    num_same_prefix = min(prefix + 1, len(a_ids), len(b_ids))
    later = _common_subsequence(a_ids[num_same_prefix:], b_ids[num_same_prefix:])
    same = [(place, place) for place in range(num_same_prefix)]
    pairs = same + [(i + num_same_prefix, j + num_same_prefix) for i, j in later]
    positions = np.asarray(pairs, np.int64).reshape(-1, 2)
    return Alignment(positions[:, 0].copy(), positions[:, 1].copy(), num_same_prefix)


def _common_subsequence(a_ids: Sequence[int], b_ids: Sequence[int]) -> list[tuple[int, int]]:
    """Return the matches of a longest common subsequence.

    Let L(i, j) be its length for the first i of a and the first j of b. Bit j - 1 of ``rows[i]`` is 0 where
    L(i, j) = L(i, j - 1) + 1, and a whole row follows from the one before it by one addition. Source: Hyyrö
    (2004), "Bit-parallel LCS-length Computation Revisited".
    """
    places: dict[int, int] = {}
    for place, token_id in enumerate(b_ids):
        places[token_id] = places.get(token_id, 0) | 1 << place
    mask = (1 << len(b_ids)) - 1
    rows = [mask]
    for token_id in a_ids:
        before = rows[-1]
        met = before & places.get(token_id, 0)
        rows.append((before + met | before - met) & mask)
    pairs = []
    i, j = len(a_ids), len(b_ids)
    while i and j:
        if rows[i] >> (j - 1) & 1:
            j -= 1
        elif not rows[i - 1] >> (j - 1) & 1:
            i -= 1
        else:
            i, j = i - 1, j - 1
            pairs.append((i, j))
    return pairs[::-1]
