"""The plots' contents; whether they look well is for eyes. A missing glyph would warn, and so fail."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from logitwire import IterationTracker
from logitwire.cli import main
from logitwire.labels import label
from logitwire.plots import MAX_LABELS, plot_iterations, plot_means, plot_positions

MARKS = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}


def tracker_of(*seeds: int, **options: Any) -> IterationTracker:
    tracker = IterationTracker(**options)
    for seed in seeds:
        rows = np.random.default_rng(seed).normal(size=(seed + 2, 30))
        tracker.add_tokens([1, seed, *range(seed)], rows)
    return tracker


def tick_labels(figure: Figure) -> list[str]:
    return [each.get_text() for each in figure.axes[0].get_xticklabels()]


def legend_of(figure: Figure) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def test_white_space_and_what_no_font_draws_are_made_visible() -> None:
    assert label(" the") == "␣the"
    assert label("\n\t") == "↵⇥"
    assert label("été Ж") == "été␣Ж"
    assert label("\x00\u200b") == r"\x00\u200b"
    assert label("\ue000") == r"\ue000"
    assert label("e\u0301") == r"e\u0301"
    assert label("") == "∅"
    assert label("a" * 40) == "a" * 15 + "…"


@pytest.mark.parametrize("suffix", MARKS)
@pytest.mark.parametrize("num", [0, 1, 5])
def test_every_format_and_length_is_drawn(tmp_path: Path, suffix: str, num: int) -> None:
    path = tmp_path / f"x{suffix}"
    tokens = ["$x^2$", " \U0001f600", "你好", "\n", "\ud800"][:num]
    plot_positions(np.linspace(0, 1, num), tokens, path, title="你 $")
    assert path.read_bytes().startswith(MARKS[suffix])


def test_each_position_has_a_bar_and_its_token() -> None:
    figure = plot_positions([0.1, 0.3], ["Hi", " you"], base="e")
    (axes,) = figure.axes
    assert [each.get_height() for each in axes.patches] == [0.1, 0.3]
    assert tick_labels(figure) == ["Hi", "␣you"]
    assert axes.get_ylabel() == "JSD (nats)"
    assert legend_of(figure) == ["same prefix, mean 0.2 nats"]


def test_pairs_behind_the_first_difference_and_gaps_look_different() -> None:
    figure = plot_positions([0.1, 0.3, 0.5], list("abcde"), positions=[0, 1, 4], num_same_prefix=2)
    (axes,) = figure.axes
    bars = {
        round(each.get_x() + each.get_width() / 2): each for each in axes.patches if each.get_zorder() >= 1
    }
    colours = {place: to_hex(bar.get_facecolor()) for place, bar in bars.items()}
    assert colours[0] == colours[1] != colours[4]
    (gap,) = (each for each in axes.patches if each.get_zorder() == 0)
    assert (gap.get_x(), gap.get_width()) == (1.5, 2)
    assert set(legend_of(figure)) == {
        "same prefix, mean 0.2 bits",
        "same token, other prefix, mean 0.5 bits",
        "not compared",
    }


def test_segments_other_than_content_are_shaded_and_named_once() -> None:
    segments = ["reasoning", "reasoning", "content", "reasoning", "special"]
    figure = plot_positions([0.1] * 5, list("abcde"), segments=segments)
    assert legend_of(figure) == ["reasoning", "special", "same prefix, mean 0.1 bits"]


def test_long_sequences_are_labelled_here_and_there(tmp_path: Path) -> None:
    figure = plot_positions(np.full(2000, 0.1), [" a"] * 2000, tmp_path / "x.png")
    assert tick_labels(figure)[:2] == ["0  ␣a", "50  ␣a"]
    assert len(tick_labels(figure)) <= MAX_LABELS
    assert figure.get_figwidth() <= 16


def test_the_heat_map_goes_from_0_to_1_bit_and_leaves_grey_what_was_not_compared(tmp_path: Path) -> None:
    tracker = tracker_of(1, 2, 5)
    figure = plot_iterations(tracker, tmp_path / "x.png")
    (image,) = figure.axes[0].images
    assert image.get_clim() == (0, 1)
    np.testing.assert_array_equal(np.ma.getmaskarray(image.get_array()), np.isnan(tracker.matrix()))
    assert [each.get_text() for each in figure.axes[0].get_yticklabels()] == ["1 → 2", "2 → 3"]
    assert figure.axes[1].get_ylabel() == "JSD (bits)"


def test_the_means_are_drawn_with_their_threshold(tmp_path: Path) -> None:
    tracker = tracker_of(1, 2, 3, threshold=0.25)
    figure = plot_means(tracker, tmp_path / "x.svg")
    means, threshold = figure.axes[0].lines
    np.testing.assert_array_equal(means.get_xydata(), np.stack([[2, 3], tracker.mean_jsd], axis=1))
    assert list(threshold.get_ydata()) == [0.25, 0.25]
    assert "threshold 0.25" in legend_of(figure)


@pytest.mark.parametrize("seeds", [(), (0,), (0, 0, 0)])
def test_few_and_equal_iterations_are_drawn_as_well(tmp_path: Path, seeds: tuple[int, ...]) -> None:
    plot_iterations(tracker_of(*seeds), tmp_path / "x.png")
    plot_means(tracker_of(*seeds), tmp_path / "y.png")


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"x\.gif: a plot is saved as \.png, \.svg, \.pdf"):
        plot_positions([0.1], ["a"], tmp_path / "x.gif")
    with pytest.raises(ValueError, match="2 values, 2 positions, 1 tokens do not match"):
        plot_positions([0.1, 0.2], ["a"])
    for options in ({"positions": [-1]}, {"positions": [2]}, {"segments": ["tool"]}):
        with pytest.raises(ValueError, match="do not match"):
            plot_positions([0.1], ["a", "b"], **options)  # type: ignore[arg-type]


def test_without_matplotlib_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("plots", "labels"):
        monkeypatch.delitem(sys.modules, f"logitwire.{name}")
        monkeypatch.delattr(f"logitwire.{name}")
    assert main(["jsd", "a", "b", "--plot", "x.png"]) == 2
    assert capsys.readouterr().err == "logitwire jsd: plots need matplotlib: pip install matplotlib\n"
