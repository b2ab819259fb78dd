"""What it costs to compare rows that have arrived: logitwire.metrics against what one writes with SciPy."""

import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import jensenshannon
from scipy.special import rel_entr, softmax
from scipy.stats import entropy as scipy_entropy

from logitwire.metrics import entropy, jsd, kl
from ops.bench.bars import Bar, Options, interleaved, seconds

VOCAB_SIZE = 152_064
NUM_ROWS = 16
"""Rows that the two sides are timed on. SciPy holds several float64 copies of all of them."""

LONG_ROWS = 4096

Compare = Callable[[NDArray[np.floating], NDArray[np.floating]], NDArray[np.float64]]


def _scipy_jsd(p: NDArray[np.floating], q: NDArray[np.floating]) -> NDArray[np.float64]:
    distance: NDArray[np.float64] = jensenshannon(*_probs(p, q), base=2, axis=-1)
    return distance**2


def _scipy_kl(p: NDArray[np.floating], q: NDArray[np.floating]) -> NDArray[np.float64]:
    found: NDArray[np.float64] = rel_entr(*_probs(p, q)).sum(axis=-1) / np.log(2)
    return found


def _scipy_entropy(p: NDArray[np.floating], q: NDArray[np.floating]) -> NDArray[np.float64]:
    found: NDArray[np.float64] = scipy_entropy(softmax(p.astype(np.float64), axis=-1), base=2, axis=-1)
    return found


def _probs(*sides: NDArray[np.floating]) -> list[NDArray[np.float64]]:
    return [softmax(side.astype(np.float64), axis=-1) for side in sides]


PAIRS: dict[str, tuple[Compare, Compare]] = {
    "jsd": (jsd, _scipy_jsd),
    "kl": (kl, _scipy_kl),
    "entropy": (lambda p, q: entropy(p), _scipy_entropy),
}


def run(options: Options) -> list[Bar]:
    """Measure speed on the same float16 rows, and memory on as many as a long answer has."""
    rng = np.random.default_rng(0)
    # Logits of a language model spread about so far.
    p, q = (rng.normal(0, 3, (NUM_ROWS, VOCAB_SIZE)).astype(np.float16) for _ in range(2))
    bars = [_speed(name, p, q, options.repeats) for name in PAIRS]
    return [*bars, _memory(p, q)]


def _speed(name: str, p: NDArray[np.float16], q: NDArray[np.float16], repeats: int) -> Bar:
    ours, theirs = PAIRS[name]
    ours_s, theirs_s = interleaved(
        [lambda: seconds(lambda: ours(p, q)), lambda: seconds(lambda: theirs(p, q))], repeats
    )
    difference = np.abs(ours(p, q) - theirs(p, q)).max()
    rates = (
        f"{NUM_ROWS / ours_s:.0f} rows/s, SciPy {NUM_ROWS / theirs_s:.0f}; they differ by {difference:.0e}"
    )
    return Bar(f"metrics, {name} against SciPy", theirs_s / ours_s, 3, False, "x", rates)


def _memory(p: NDArray[np.float16], q: NDArray[np.float16]) -> Bar:
    """Compare two long answers that lie in files, 1.2 GB each."""
    with tempfile.TemporaryDirectory() as folder:
        long_p, long_q = (_long(Path(folder) / name, rows) for name, rows in (("p", p), ("q", q)))
        began = time.perf_counter()
        peak = _peak_bytes(lambda: jsd(long_p, long_q))
        took_s = time.perf_counter() - began
    scipy_peak = _peak_bytes(lambda: _scipy_jsd(p, q))
    for_long = scipy_peak / NUM_ROWS * LONG_ROWS
    note = (
        f"T = {LONG_ROWS}, V = {VOCAB_SIZE:,}, in {took_s:.1f} s; SciPy {scipy_peak / 2**20:.0f} MiB "
        f"for T = {NUM_ROWS}, so {for_long / 2**30:.0f} GiB for this T"
    )
    return Bar("metrics, memory of jsd", peak / 2**20, 64, True, " MiB", note)


def _long(path: Path, rows: NDArray[np.float16]) -> NDArray[np.float16]:
    with path.open("wb") as file:
        for _ in range(LONG_ROWS // NUM_ROWS):
            file.write(rows.data)
    return np.memmap(path, np.float16, "r", shape=(LONG_ROWS, VOCAB_SIZE))


def _peak_bytes(call: Callable[[], object]) -> int:
    """Return how much memory a call allocates at most; mapped files do not count, as nothing holds them."""
    tracemalloc.start()
    call()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak
