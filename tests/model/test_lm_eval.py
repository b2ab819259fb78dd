"""lm-evaluation-harness as it is, through the server and in process on the same weights: the same figures."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.loading import EMBEDDED_NAME, embedded_checkpoint
from ops.process import ROOT, ServerProcess

TASKS = "tests/model/lm_eval_tasks"
DEADLINE_S = 280
NUM_ITEMS = 24
NUM_IN_BATCHES = 8

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

# One thread each, for both sides take turns; and other work on the machine then costs its share and no more.
ENVIRON = {"OMP_NUM_THREADS": "1"}


class Run:
    """What one command of the harness wrote."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def metrics(self, task: str) -> dict[str, Any]:
        (path,) = self._folder.rglob("results_*.json")
        metrics: dict[str, Any] = json.loads(path.read_text())["results"][task]
        return metrics

    def responses(self, task: str) -> list[Any]:
        """Return the answers to a task's requests, by document."""
        (path,) = self._folder.rglob(f"samples_{task}_*.jsonl")
        samples = [json.loads(line) for line in path.read_text().splitlines()]
        return [each["resps"] for each in sorted(samples, key=lambda each: each["doc_id"])]

    def choices(self) -> list[tuple[float, bool]]:
        """Return log-likelihood, and whether it is what greedy decoding writes, of every choice."""
        found = []
        for document in self.responses("local_choices"):
            for ((logprob, is_greedy),) in document:
                assert is_greedy in ("True", "False")
                found.append((float(logprob), is_greedy == "True"))
        return found

    def documents(self) -> list[float]:
        """Return the log-likelihood of every document."""
        return [float(logprob) for ((logprob,),) in self.responses("local_perplexity")]

    def answers(self) -> list[str]:
        return [text for ((text,),) in self.responses("local_answers")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """All of the harness's runs, by name."""
    folder = tmp_path_factory.mktemp("lm_eval")
    checkpoint = str(embedded_checkpoint(EngineConfig.cache_dir))
    everything = "local_choices,local_perplexity,local_answers"
    server = ServerProcess(folder / "log", THREADS="1", **ENVIRON)
    try:
        completions = f"model={EMBEDDED_NAME},base_url={server.url}/v1/completions"
        chat = f"model={EMBEDDED_NAME},base_url={server.url}/v1/chat/completions"
        in_process = ("hf", f"pretrained={checkpoint},dtype=float32", "--device", "cpu")
        commands = {
            # As the README has it: the harness finds out that the server tokenises.
            "remote": ("local-completions", f"{completions},num_concurrent=4", "--tasks", everything),
            # It tokenises itself, and sends several lists of ids at once.
            "batches": (
                "local-completions",
                f"{completions},tokenizer_backend=huggingface,tokenizer={checkpoint}",
                *("--tasks", "local_choices", "--batch_size", "8", "--limit", str(NUM_IN_BATCHES)),
            ),
            "chat": ("local-chat-completions", chat, "--tasks", "local_answers", "--apply_chat_template"),
            "reference": (*in_process, "--tasks", everything),
            "reference_chat": (*in_process, "--tasks", "local_answers", "--apply_chat_template"),
        }
        arguments = [
            [
                *("run", "--model", model, "--model_args", model_args, *others),
                *("--include_path", TASKS, "--output_path", str(folder / name), "--log_samples"),
            ]
            for name, (model, model_args, *others) in commands.items()
        ]
        process = subprocess.run(
            [sys.executable, "tests/model/lm_eval_commands.py", json.dumps(arguments)],
            cwd=ROOT,
            env={
                **os.environ,
                **ENVIRON,
                "HF_HOME": str(folder / "cache"),
                "HF_DATASETS_OFFLINE": "1",
                "HF_HUB_OFFLINE": "1",
                "TOKENIZERS_PARALLELISM": "false",
            },
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
    finally:
        code = server.stop()
    assert process.returncode == 0, process.stderr[-4000:]
    assert code == 0
    # The harness tries again by itself, so that a request that was refused would not be seen.
    assert "Retrying" not in process.stderr
    assert "Auto-detected remote tokenizer support" in process.stderr
    return {name: Run(folder / name) for name in commands}


@pytest.mark.parametrize(("name", "num_items"), [("remote", NUM_ITEMS), ("batches", NUM_IN_BATCHES)])
def test_each_choice_is_as_likely_as_in_process(runs: dict[str, Run], name: str, num_items: int) -> None:
    found, expected = runs[name].choices(), runs["reference"].choices()[: 4 * num_items]
    assert len(found) == 4 * num_items
    assert [logprob for logprob, _ in found] == pytest.approx(
        [logprob for logprob, _ in expected], rel=0, abs=1e-3
    )
    assert [is_greedy for _, is_greedy in found] == [is_greedy for _, is_greedy in expected]
    assert any(is_greedy for _, is_greedy in found)


def test_accuracies_are_the_same(runs: dict[str, Run]) -> None:
    metrics, reference = (runs[name].metrics("local_choices") for name in ("remote", "reference"))
    for metric in ("acc,none", "acc_norm,none"):
        assert metrics[metric] == reference[metric]


def test_documents_are_as_likely_as_in_process(runs: dict[str, Run]) -> None:
    assert runs["remote"].documents() == pytest.approx(runs["reference"].documents(), rel=0, abs=1e-3)
    metrics, reference = (runs[name].metrics("local_perplexity") for name in ("remote", "reference"))
    for metric in ("word_perplexity,none", "byte_perplexity,none", "bits_per_byte,none"):
        assert metrics[metric] == pytest.approx(reference[metric], rel=1e-3)


@pytest.mark.parametrize(("name", "reference"), [("remote", "reference"), ("chat", "reference_chat")])
def test_greedy_texts_are_the_same(runs: dict[str, Run], name: str, reference: str) -> None:
    answers = runs[name].answers()
    assert answers == runs[reference].answers()
    # Some may end at once.
    assert sum(map(bool, answers)) >= 5
    key = "exact_match,none"
    assert runs[name].metrics("local_answers")[key] == runs[reference].metrics("local_answers")[key]
