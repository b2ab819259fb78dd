"""The training-side examples, run as a reader runs them, against the embedded model."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.spatial.distance import jensenshannon
from scipy.special import softmax
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.config import EngineConfig
from engine.loading import embedded_checkpoint
from logitwire import IterationTracker
from ops.process import ServerProcess

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = "clients/python/examples"

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    process = ServerProcess(tmp_path_factory.mktemp("examples") / "log", THREADS="1")
    yield process
    assert process.stop() == 0


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep torch from fighting the server for the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(server: ServerProcess, example: str, *arguments: str) -> str:
    command = [sys.executable, f"{EXAMPLES}/{example}", "--base-url", server.url, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout


def test_a_student_comes_closer_to_the_teacher(server: ServerProcess) -> None:
    output = run(server, "distill_tiny_student.py", "--steps", "12")
    losses = [float(line.split()[2]) for line in output.splitlines() if re.match(r" +\d+ ", line)]
    assert len(losses) == 12
    assert losses[-1] < losses[0] / 2


def test_a_refinement_loop_converges(server: ServerProcess, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = ["--max-tokens", "10", "--keep-rows", "all", "--no-plots", "-o", folder]
    task = f"{EXAMPLES}/task.yaml"
    command = [sys.executable, "-m", "logitwire", "loop", task, "--base-url", server.url, *map(str, options)]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    assert "\nconverged: " in output
    tracker = IterationTracker.load(folder / "iterations.parquet")
    assert tracker.converged
    first, second = tracker.iterations[:2]
    num = tracker.comparisons[0].alignment.num_same_prefix
    assert first.logits is not None
    assert second.logits is not None
    p, q = (softmax(np.asarray(each.logits, np.float64)[:num], axis=-1) for each in (first, second))
    mean = np.mean(jensenshannon(p, q, base=2, axis=-1) ** 2)
    # The critic's words moved the generator at first, and are printed as the file has them.
    assert tracker.mean_jsd[0] == pytest.approx(mean, abs=1e-6)
    assert mean > tracker.threshold
    assert f"  {mean:.6f}  {second.text!r}" in output


def test_the_calibration_of_a_text_is_that_of_a_forward_pass(server: ServerProcess) -> None:
    output = run(server, "calibration_of_a_text.py", "--per-token")
    folder = embedded_checkpoint(EngineConfig.cache_dir)
    text = (ROOT / EXAMPLES / "lighthouse.txt").read_text(encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with one_thread(), torch.inference_mode():
        logprobs = model(ids).logits[0, :-1].double().log_softmax(-1)
    actual, probs = ids[0, 1:], logprobs.exp()
    num = len(actual)

    def said(pattern: str) -> list[float]:
        found = re.search(pattern, output)
        assert found is not None
        return [float(each) for each in found.groups()]

    assert said(r"(\d+) tokens with a prediction") == [num]
    mean = logprobs[range(num), actual].mean().item()
    assert said(r"mean logprob: +(\S+) nats, perplexity (\S+)") == pytest.approx(
        [mean, np.exp(-mean)], rel=1e-3
    )
    assert said(r"mean logprob: +(\S+) nats") == pytest.approx([mean], abs=1e-3)
    entropy = -(probs * logprobs).sum(-1).mean().item()
    assert said(r"mean entropy: +(\S+) nats, (\S+) bits") == pytest.approx(
        [entropy, entropy / np.log(2)], abs=1e-3
    )
    assert len(re.findall(r"^ +\d+  ['\"]", output, re.MULTILINE)) == num + 5

    bins = re.findall(r"^ +([\d.]+) to ([\d.]+) +(\d+) +(\S+) +(\S+)$", output, re.MULTILINE)
    assert len(bins) == 10
    assert sum(int(each[2]) for each in bins) == num
    top = probs.max(-1)
    is_right = (top.indices == actual).double()
    places = (top.values * 10).ceil().clamp(1, 10) - 1
    gaps = [abs((is_right - top.values)[places == place].sum().item()) for place in range(10)]
    # A position on the edge of a bin may fall to either side.
    assert said(r"expected calibration error: (\S+)") == pytest.approx([sum(gaps) / num], abs=2e-3)


def test_what_cannot_be_scored_is_said_in_one_line(server: ServerProcess, tmp_path: Path) -> None:
    long = tmp_path / "long.txt"
    long.write_text("word " * 9000)
    process = subprocess.run(
        [sys.executable, f"{EXAMPLES}/calibration_of_a_text.py", str(long), "--base-url", server.url],
        cwd=ROOT,
        capture_output=True,
        check=False,
        text=True,
    )
    assert process.returncode == 1
    assert process.stderr.startswith(f"{long} was not scored: ")
    assert "8192" in process.stderr
    assert "Traceback" not in process.stderr
