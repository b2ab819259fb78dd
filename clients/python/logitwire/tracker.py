"""The iterations of a refinement loop: how far each is from the one before, and whether they still move."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from logitwire import tracker_file
from logitwire.alignment import align
from logitwire.iterations import Comparison, Iteration
from logitwire.metrics import Base, jsd
from logitwire.views import RowsLike, as_rows

Pairs: TypeAlias = Literal["same prefix", "all"]

OPTIONS = ("threshold", "patience", "pairs", "base", "temperature", "keep_rows")
"""What :meth:`IterationTracker.__init__` takes, and what is saved."""


class Result(Protocol):
    """What a completion must have to be added; the client's results do."""

    @property
    def text(self) -> str: ...  # noqa: D102 - as of any result

    @property
    def token_ids(self) -> Sequence[int]: ...  # noqa: D102 - as of any result

    @property
    def tokens(self) -> Sequence[str]: ...  # noqa: D102 - as of any result

    @property
    def logits(self) -> Any: ...  # noqa: D102 - as of any result


class IterationTracker:
    """Collects the iterations of a loop and compares each with the one before it.

    By default it holds the rows of the last iteration only, which is all that the next comparison needs. Rows
    of a tracker that was loaded stay in its file, so one that keeps all can be saved and loaded to free
    memory.

    Attributes:
        iterations: All that were added.
        comparisons: One less: ``comparisons[i]`` is of ``iterations[i]`` and ``iterations[i + 1]``.
    """

    def __init__(
        self,
        *,
        threshold: float = 0.01,
        patience: int = 2,
        pairs: Pairs = "same prefix",
        base: Base = 2,
        temperature: float = 1.0,
        keep_rows: Literal["last", "all"] = "last",
    ) -> None:
        """Start without iterations.

        Args:
            threshold: Mean divergence below which two iterations count as the same, in units of ``base``.
            patience: So many comparisons in a row must be below the threshold.
            pairs: Which positions are compared: those that follow the same generated tokens, or all that
                :func:`logitwire.align` finds.
            base: Of the logarithm.
            temperature: Divides the logits before they are compared.
            keep_rows: Whose rows are held, and saved.

        Raises:
            ValueError: An option makes no sense.
        """
        if not threshold > 0:
            raise ValueError(f"threshold must be above 0, not {threshold}")
        if not isinstance(patience, int) or patience < 1:
            raise ValueError(f"patience must be 1 at least, not {patience}")
        if pairs not in ("same prefix", "all"):
            raise ValueError(f"pairs must be 'same prefix' or 'all', not {pairs!r}")
        if keep_rows not in ("last", "all"):
            raise ValueError(f"keep_rows must be 'last' or 'all', not {keep_rows!r}")
        # Refuses a base or a temperature that makes no sense, before a loop has cost anything.
        jsd([0.0], [0.0], base, temperature=temperature)
        self.threshold = threshold
        self.patience = patience
        self.pairs: Pairs = pairs
        self.base: Base = base
        self.temperature = temperature
        self.keep_rows = keep_rows
        self.iterations: list[Iteration] = []
        self.comparisons: list[Comparison] = []

    def add(self, result: Result, /, **metadata: Any) -> Comparison | None:
        """Add a completion, such as what the client returns; see :meth:`add_tokens`."""
        return self.add_tokens(
            result.token_ids,
            result.logits,
            tokens=result.tokens,
            text=result.text,
            metadata=metadata,
        )

    def add_tokens(
        self,
        token_ids: Sequence[int],
        logits: RowsLike | None,
        *,
        tokens: Sequence[str] | None = None,
        text: str | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> Comparison | None:
        """Add a completion by its parts, and compare it with the last one.

        Args:
            token_ids: T ids; none at all are an empty completion.
            logits: (T, V), not copied; may be a memory map.
            tokens: T token texts, for plots.
            text: What the completion says; without it, the tokens joined.
            metadata: Anything to be saved with it, as JSON; numpy's numbers and arrays become plain ones.

        Returns:
            The comparison; ``None`` for the first iteration.

        Raises:
            ValueError: There is not one row per token, or the rows are of another vocabulary, or the last
                iteration was saved without rows. The tracker is then as before.
        """
        ids = [int(token_id) for token_id in token_ids]
        texts = [f"token_id:{token_id}" for token_id in ids] if tokens is None else list(tokens)
        if logits is None:
            raise ValueError("there are no rows; ask the server for logits")
        # An empty completion may come as rows without a width.
        rows = as_rows(logits) if ids else None
        if len(texts) != len(ids) or (rows is not None and rows.shape[0] != len(ids)):
            num_rows = 0 if rows is None else rows.shape[0]
            raise ValueError(f"{len(ids)} token ids, {len(texts)} tokens and {num_rows} rows do not match")
        if rows is not None:
            self._check_width(rows.shape[1])
        said = "".join(texts) if text is None else text
        new = Iteration(said, ids, texts, rows, dict(metadata or {}))
        comparison = self._compare(self.iterations[-1], new) if self.iterations else None
        if comparison is not None:
            self.comparisons.append(comparison)
            if self.keep_rows == "last":
                self.iterations[-1] = replace(self.iterations[-1], logits=None)
        self.iterations.append(new)
        return comparison

    @property
    def mean_jsd(self) -> NDArray[np.float64]:
        """The mean of each comparison, float64 (iterations - 1,)."""
        return np.array([each.mean for each in self.comparisons], np.float64)

    @property
    def converged(self) -> bool:
        """Whether the last ``patience`` comparisons are all below the threshold; one without pairs is not."""
        last = self.mean_jsd[-self.patience :]
        return len(last) == self.patience and bool((last < self.threshold).all())

    def matrix(self) -> NDArray[np.float64]:
        """Return all comparisons as one array: (iterations - 1, longest T), NaN where nothing was compared.

        The columns are the positions of the later iteration of each pair.
        """
        width = max((len(each.token_ids) for each in self.iterations[1:]), default=0)
        found = np.full((len(self.comparisons), width), np.nan)
        for row, each in zip(found, self.comparisons, strict=True):
            row[each.alignment.b_positions] = each.jsd
        return found

    def save(self, path: str | Path, *, with_rows: bool = True) -> None:
        """Write everything to one Parquet file, which takes its place when it is whole.

        Args:
            path: Of the file.
            with_rows: Whether the rows that are held are written too. Only then can more be added after
                :meth:`load`.

        Raises:
            OSError: It cannot be written.
            ValueError: Some metadata is nothing that JSON knows.
        """
        options = {name: getattr(self, name) for name in OPTIONS}
        tracker_file.write(Path(path), options, self.iterations, self.comparisons, with_rows=with_rows)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Return the tracker that was saved; its rows are read from the file when they are used.

        Raises:
            OSError: The file cannot be read.
            RowFileError: It holds no iterations.
        """
        options, iterations, comparisons = tracker_file.read(Path(path))
        tracker = cls(**options)
        tracker.iterations, tracker.comparisons = iterations, comparisons
        return tracker

    def _check_width(self, width: int) -> None:
        held = (each.logits.shape[1] for each in reversed(self.iterations) if each.logits is not None)
        if (before := next(held, width)) != width:
            raise ValueError(f"the rows have {before} and {width} columns: not of one vocabulary")

    def _compare(self, before: Iteration, new: Iteration) -> Comparison:
        alignment = align(before.token_ids, new.token_ids)
        if self.pairs == "same prefix":
            alignment = alignment.same_prefix()
        if not len(alignment.a_positions):
            return Comparison(alignment, np.empty(0))
        if before.logits is None or new.logits is None:
            raise ValueError("the last iteration was saved without rows, so nothing can be compared with it")
        jsd = alignment.jsd(before.logits, new.logits, self.base, temperature=self.temperature)
        return Comparison(alignment, jsd)
