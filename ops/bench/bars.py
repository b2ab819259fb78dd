"""What a measurement is held against, and how it is printed and kept."""

import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import torch


@dataclass(frozen=True, slots=True)
class Options:
    """How to measure.

    Attributes:
        threads: Of the model, on both sides.
        repeats: Medians are taken over so many.
        minutes: Of the soak.
        requests: Of the soak at most; 0 is no limit.
        model: Of the soak; empty is the embedded one.
    """

    threads: int
    repeats: int
    minutes: float = 2.0
    requests: int = 0
    model: str = ""


@dataclass(frozen=True, slots=True)
class Bar:
    """One measured value and what it must reach.

    Attributes:
        value: A ratio, or a number in ``unit``.
        reach: The bound; from below, or from above where ``is_upper`` is set.
        note: The absolute numbers behind the value.
    """

    name: str
    value: float
    reach: float
    is_upper: bool
    unit: str
    note: str

    @property
    def holds(self) -> bool:
        """Tell whether the bound is kept."""
        return self.value <= self.reach if self.is_upper else self.value >= self.reach


def seconds(call: Callable[[], object]) -> float:
    """Return how long a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def interleaved(calls: Sequence[Callable[[], float]], repeats: int) -> list[float]:
    """Return the median of each call's result; the calls take turns, so that a noisy spell hits all alike."""
    results: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()  # warm-up
    for _ in range(repeats):
        for place, call in enumerate(calls):
            results[place].append(call())
    return [statistics.median(each) for each in results]


def machine() -> dict[str, object]:
    """Return what the numbers were measured on."""
    model = next(
        (
            line.split(":")[1].strip()
            for line in _lines(Path("/proc/cpuinfo"))
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {"cpu": model, "cores": torch.get_num_threads(), "system": platform.platform()}


def versions() -> dict[str, str]:
    """Return the versions that the numbers depend on."""
    names = ("torch", "transformers", "litestar", "uvicorn", "msgspec", "pyarrow", "numpy")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def table(bars: Sequence[Bar]) -> str:
    """Return the bars as a Markdown table."""
    lines = ["| bar | measured | reach | holds | numbers |", "|---|---|---|---|---|"]
    for bar in bars:
        sign = "<=" if bar.is_upper else ">="
        holds = "yes" if bar.holds else "**no**"
        measured, reach = f"{bar.value:.3g}{bar.unit}", f"{sign} {bar.reach:g}{bar.unit}"
        lines.append(f"| {bar.name} | {measured} | {reach} | {holds} | {bar.note} |")
    return "\n".join(lines)


def save(bars: Sequence[Bar], path: Path) -> None:
    """Write the results as JSON."""
    results = {
        "bars": [{**asdict(bar), "holds": bar.holds} for bar in bars],
        "machine": machine(),
        "versions": versions(),
    }
    path.write_text(json.dumps(results, indent=2) + "\n")
