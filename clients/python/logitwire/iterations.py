"""What a refinement loop leaves behind: its iterations, and comparisons of each with the one before."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from logitwire.alignment import Alignment
from logitwire.views import SlicedRows, shown


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Iteration:
    """One completion of the loop.

    Attributes:
        text: What it says.
        token_ids: T ids.
        tokens: T token texts.
        logits: (T, V); ``None`` where the rows are not kept.
        metadata: What the caller noted of it.
    """

    text: str
    token_ids: list[int]
    tokens: list[str]
    logits: SlicedRows | None
    metadata: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<Iteration {self.text!r}, {len(self.token_ids)} tokens, {shown(self.logits)}>"


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """An iteration and the one before it.

    Attributes:
        alignment: Which positions were compared; ``a`` is the one before.
        jsd: float64 (n,), one value per pair.
    """

    alignment: Alignment
    jsd: NDArray[np.float64]

    @property
    def mean(self) -> float:
        """The mean over the pairs; NaN if there are none, since one of the two is empty."""
        return float(self.jsd.mean()) if len(self.jsd) else math.nan
