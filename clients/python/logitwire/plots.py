"""Curves and heat maps of divergences, as PNG, SVG or PDF. Needs matplotlib, which is the extra ``plot``."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from logitwire.labels import FAMILIES, drawable, label
from logitwire.metrics import Base

try:
    from matplotlib.axes import Axes
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise ImportError("plots need matplotlib: pip install matplotlib") from error

if TYPE_CHECKING:
    from logitwire.tracker import IterationTracker

UNITS: dict[Base, str] = {2: "bits", "e": "nats"}
LARGEST: dict[Base, float] = {2: 1.0, "e": float(np.log(2))}
SUFFIXES = (".png", ".svg", ".pdf")

INCHES_PER_POSITION = 0.24
MIN_WIDTH, MAX_WIDTH = 6.0, 16.0
INCHES_PER_ENTRY = 2.9
MAX_LABELS = 72
"""As many token labels fit next to each other on the widest figure."""
LABEL_STEPS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)

SAME_PREFIX, SAME_TOKEN, NOT_COMPARED = "#2b6cb0", "#dd8b3c", "#e4e4e4"
THRESHOLD = "#c0392b"
SEGMENTS = {"reasoning": "#fff2cc", "tool": "#e2f0d9", "special": "#fbe5e1"}


def plot_positions(
    jsd: ArrayLike,
    tokens: Sequence[str],
    path: str | Path | None = None,
    *,
    positions: ArrayLike | None = None,
    num_same_prefix: int | None = None,
    segments: Sequence[str] | None = None,
    base: Base = 2,
    title: str | None = None,
) -> Figure:
    """Draw a bar of divergence for each position, with the tokens below.

    Args:
        jsd: (n,) divergences.
        tokens: T token texts. White space is made visible, and long sequences are labelled here and there.
        path: Where to save it: .png, .svg or .pdf. Without one it is only returned.
        positions: (n,) places in ``tokens``; without them, the first n. What is left out stands on grey.
        num_same_prefix: The first so many bars follow the same generated tokens; the others get another
            colour. See :class:`logitwire.Alignment`.
        segments: T words as in a result; anything but "content" is shaded.
        base: Of the logarithm that was taken; names the unit.
        title: Above it.

    Raises:
        ValueError: The path has another suffix, or the lengths do not match.
    """
    values = np.asarray(jsd, np.float64)
    places = np.arange(len(values)) if positions is None else np.asarray(positions, np.int64)
    if (
        len(places) != len(values)
        or (len(places) and not 0 <= places.min() <= places.max() < len(tokens))
        or (segments is not None and len(segments) != len(tokens))
    ):
        raise ValueError(f"{len(values)} values, {len(places)} positions, {len(tokens)} tokens do not match")
    figure = _figure(INCHES_PER_POSITION * len(tokens), 3.6)
    axes = figure.subplots()
    num = len(values) if num_same_prefix is None else num_same_prefix
    _shade(axes, len(tokens), places, segments)
    # Thin bars with gaps between them would flicker.
    width = 1.0 if len(tokens) > MAX_LABELS else 0.8
    for part, colour, name in (
        (slice(None, num), SAME_PREFIX, "same prefix"),
        (slice(num, None), SAME_TOKEN, "same token, other prefix"),
    ):
        if len(values[part]):
            mean = float(values[part].mean())
            text = f"{name}, mean {mean:.3g} {UNITS[base]}"
            axes.bar(places[part], values[part], width, color=colour, linewidth=0, label=text)
            ends = places[part].min() - 0.5, places[part].max() + 0.5
            axes.hlines(mean, *ends, color=colour, linestyle="--", linewidth=1)
    _label_tokens(axes, tokens)
    axes.set_xlim(-0.6, max(len(tokens), 1) - 0.4)
    axes.set_ylim(0, _top(values, base))
    axes.set_ylabel(f"JSD ({UNITS[base]})")
    _entitle(axes, title)
    _explain(figure, axes)
    return _saved(figure, path)


def plot_iterations(
    tracker: "IterationTracker", path: str | Path | None = None, *, title: str | None = None
) -> Figure:
    """Draw the divergence of each pair of successive iterations as a row of colours over the positions.

    The scale goes from 0 to the largest possible value, by the square root, so that small divergences show.
    Positions that were not compared are grey. Arguments and errors are those of :func:`plot_positions`.
    """
    found = tracker.matrix()
    figure = _figure(0.1 * found.shape[1], 1.6 + 0.3 * len(found), least=7.0)
    axes = figure.subplots()
    image = axes.imshow(
        np.ma.masked_invalid(found if found.size else [[np.nan]]),
        aspect="auto",
        interpolation="nearest",
        norm=PowerNorm(0.5, 0, LARGEST[tracker.base]),
        cmap="viridis",
    )
    axes.set_facecolor(NOT_COMPARED)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlabel("position in the later iteration")
    step = max(1, len(found) // 40)
    named = range(0, len(found), step)
    axes.set_yticks(list(named), [f"{place + 1} → {place + 2}" for place in named])
    axes.set_ylabel("iterations")
    ticks = [share * LARGEST[tracker.base] for share in (0, 0.01, 0.1, 0.25, 0.5, 1)]
    figure.colorbar(image, ax=axes, ticks=ticks, format="%.3g", label=f"JSD ({UNITS[tracker.base]})")
    _entitle(axes, title)
    return _saved(figure, path)


def plot_means(
    tracker: "IterationTracker", path: str | Path | None = None, *, title: str | None = None
) -> Figure:
    """Draw the mean divergence of each iteration from the one before it, and the threshold.

    Arguments and errors are those of :func:`plot_positions`.
    """
    means = tracker.mean_jsd
    figure = _figure(0.4 * len(means), 3.6)
    axes = figure.subplots()
    pairs = "the same prefix" if tracker.pairs == "same prefix" else "all aligned positions"
    numbers = np.arange(2, len(means) + 2)
    axes.plot(numbers, means, marker="o", color=SAME_PREFIX, clip_on=False, label=f"mean over {pairs}")
    limit = f"threshold {tracker.threshold:g}"
    axes.axhline(tracker.threshold, color=THRESHOLD, linestyle="--", linewidth=1, label=limit)
    axes.set_xlim(1.5, max(len(means), 1) + 1.5)
    axes.set_ylim(0, _top(np.append(means, tracker.threshold), tracker.base))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("iteration, compared with the one before")
    axes.set_ylabel(f"mean JSD ({UNITS[tracker.base]})")
    _explain(figure, axes)
    _entitle(axes, title)
    return _saved(figure, path)


def _explain(figure: Figure, axes: Axes) -> None:
    if axes.get_legend_handles_labels()[0]:
        columns = int(figure.get_figwidth() / INCHES_PER_ENTRY)
        figure.legend(loc="outside upper right", ncols=columns, frameon=False, fontsize="small")


def _entitle(axes: Axes, title: str | None) -> None:
    if title is not None:
        axes.set_title(drawable(title), parse_math=False, family=FAMILIES)


def _figure(width: float, height: float, least: float = MIN_WIDTH) -> Figure:
    return Figure((min(max(width, least), MAX_WIDTH), min(height, 14.0)), layout="constrained")


def _top(values: NDArray[np.float64], base: Base) -> float:
    """Return the end of the scale: a little over the largest value, and no more than can be."""
    largest = float(np.nanmax(values)) if np.isfinite(values).any() else 0.0
    return min(max(1.1 * largest, 0.01), 1.02 * LARGEST[base])


def _shade(axes: Axes, num: int, places: NDArray[np.int64], segments: Sequence[str] | None) -> None:
    """Colour what is behind positions that were not compared, and behind segments other than content."""
    is_compared = set(places.tolist())
    kinds = [
        (segments[place] if segments is not None else "content") if place in is_compared else ""
        for place in range(num)
    ]
    named: set[str] = set()
    for kind, run in groupby(range(num), key=kinds.__getitem__):
        if kind != "content":
            covered = list(run)
            colour = SEGMENTS.get(kind, NOT_COMPARED)
            shade = axes.axvspan(covered[0] - 0.5, covered[-1] + 0.5, color=colour, linewidth=0, zorder=0)
            if kind not in named:
                shade.set_label(kind or "not compared")
                named.add(kind)


def _label_tokens(axes: Axes, tokens: Sequence[str]) -> None:
    """Name the positions by their tokens; in a long sequence, some of them, with their numbers."""
    steps = (each for each in LABEL_STEPS if each * MAX_LABELS >= len(tokens))
    step = next(steps, max(1, len(tokens)))
    ticks = range(0, len(tokens), step)
    texts = [label(tokens[place]) if step == 1 else f"{place}  {label(tokens[place])}" for place in ticks]
    axes.set_xticks(list(ticks), texts, rotation=90, fontsize=8, family=FAMILIES, parse_math=False)
    axes.set_xlabel("token" if step == 1 else "position and token")


def check_path(path: str | Path) -> None:
    """Refuse a path that no plot can be saved to.

    Raises:
        ValueError: Its suffix is none of the three.
    """
    if Path(path).suffix.lower() not in SUFFIXES:
        raise ValueError(f"{path}: a plot is saved as {', '.join(SUFFIXES)}")


def _saved(figure: Figure, path: str | Path | None) -> Figure:
    if path is not None:
        check_path(path)
        figure.savefig(path, dpi=150)
    return figure
