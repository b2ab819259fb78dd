"""The server over HTTP against ``generate`` in this process: the same model, dtype and threads."""

import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.config import EngineConfig
from engine.loading import embedded_checkpoint
from logitwire import Client
from ops.bench.bars import Bar, Options, interleaved, seconds
from ops.process import ServerProcess

TASK = "Write a long story about a lighthouse."
NUM_TOKENS = 48
WINDOW_S = 0.05
"""How long the static baseline waits for companions of the first request of a batch."""


@dataclass(frozen=True)
class Work:
    """One request of the mixed load; ``delay_s`` after the start."""

    delay_s: float
    task: str
    num_tokens: int
    settings: tuple[tuple[str, Any], ...]
    seed: int


def mixed_load(num: int = 32) -> list[Work]:
    """Return requests of mixed lengths, settings, seeds and arrivals; always the same ones."""
    chance = random.Random(0)  # noqa: S311 - a load, no secret
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 50},
        {"temperature": 1.2, "repetition_penalty": 1.1},
    ]
    subjects = ("a lighthouse", "two rivers", "the last train", "bread", "a glass mountain", "winter")
    return [
        Work(
            delay_s=place * 0.05,
            task=f"Write {chance.choice(('a story', 'a poem', 'a letter'))} about {chance.choice(subjects)}.",
            num_tokens=chance.choice((16, 32, 64, 128, 256)),
            settings=tuple(chance.choice(kinds).items()),
            seed=place,
        )
        for place in range(num)
    ]


class Reference:
    """``generate`` on the embedded model, in this process, one batch at a time."""

    def __init__(self) -> None:
        path = embedded_checkpoint(EngineConfig.cache_dir)
        self._model = AutoModelForCausalLM.from_pretrained(path).eval()
        self._model.generation_config.eos_token_id = None
        self._tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")

    def generate(
        self, tasks: Sequence[str], num_tokens: int, *, output_logits: bool, **settings: Any
    ) -> None:
        """Run one static batch."""
        inputs = self._tokenizer.apply_chat_template(
            [[{"role": "user", "content": task}] for task in tasks],
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
            padding=True,
        )
        temperature = settings.pop("temperature", 0.0)
        sampling = (
            {"do_sample": True, "temperature": temperature, "top_k": 0}
            if temperature
            else {"do_sample": False}
        )
        self._model.generate(
            **inputs,
            **(sampling | settings),
            max_new_tokens=num_tokens,
            output_logits=output_logits,
            return_dict_in_generate=True,
        )

    def static_batches(self, load: Sequence[Work]) -> tuple[float, list[float]]:
        """Serve a load as the textbook does; return the seconds it took, and each request's latency.

        Take the first that waits, wait for companions with the same settings, run them to the longest.
        """
        began = time.perf_counter()
        waiting = sorted(load, key=lambda work: work.delay_s)
        latencies: list[float] = []
        while waiting:
            first = waiting[0]
            now = time.perf_counter() - began
            time.sleep(max(0.0, first.delay_s - now) + WINDOW_S)
            now = time.perf_counter() - began
            batch = [each for each in waiting if each.delay_s <= now and each.settings == first.settings]
            waiting = [each for each in waiting if each not in batch]
            self.generate(
                [each.task for each in batch],
                max(each.num_tokens for each in batch),
                output_logits=True,
                **dict(first.settings),
            )
            end = time.perf_counter() - began
            latencies += [end - each.delay_s for each in batch]
        return time.perf_counter() - began, latencies


class Served:
    """The server in a process of its own, and clients that read every row as a numpy view."""

    def __init__(self, url: str) -> None:
        self._client = Client(url)

    def chat(self, task: str, num_tokens: int, *, rows: bool, **settings: Any) -> None:
        """Run one request, and look at every row that comes."""
        answer = self._client.chat(
            [{"role": "user", "content": task}],
            max_tokens=num_tokens,
            logits="float16" if rows else None,
            ignore_eos=True,
            **{"temperature": 0.0, **settings},
        )
        assert len(answer.token_ids) == num_tokens
        if answer.logits is not None:
            assert answer.logits.shape[0] == num_tokens

    def at_once(self, num: int, *, rows: bool) -> None:
        """Run equal requests at once."""
        with ThreadPoolExecutor(num) as pool:
            for done in [pool.submit(self.chat, TASK, NUM_TOKENS, rows=rows) for _ in range(num)]:
                done.result()

    def load(self, load: Sequence[Work]) -> tuple[float, list[float]]:
        """Serve a load; return the seconds it took, and each request's latency."""
        latencies: list[float] = []
        began = time.perf_counter()

        def run(work: Work) -> None:
            time.sleep(max(0.0, began + work.delay_s - time.perf_counter()))
            self.chat(work.task, work.num_tokens, rows=True, seed=work.seed, **dict(work.settings))
            latencies.append(time.perf_counter() - began - work.delay_s)

        threads = [threading.Thread(target=run, args=(work,)) for work in load]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - began, latencies


Part = Callable[[Served, Reference, int], list[Bar]]


def _against_generate(options: Options, *parts: Part) -> list[Bar]:
    """Start a server, and measure parts against ``generate``."""
    torch.set_num_threads(options.threads)
    reference = Reference()
    with tempfile.TemporaryDirectory() as folder:
        server = ServerProcess(Path(folder) / "log", THREADS=str(options.threads), MAX_BATCH_SIZE="32")
        try:
            served = Served(server.url)
            return [bar for part in parts for bar in part(served, reference, options.repeats)]
        finally:
            server.stop()


def equal(options: Options) -> list[Bar]:
    """Measure equal requests, solo and eight at once, with rows and without."""
    return _against_generate(options, _solo, _eight)


def mixed(options: Options) -> list[Bar]:
    """Measure a mixed load against static batches; takes some 15 minutes on two cores."""
    return _against_generate(options, _mixed)


def _rate(num_tokens: int, call: Callable[[], None]) -> Callable[[], float]:
    return lambda: num_tokens / seconds(call)


def _solo(served: Served, reference: Reference, repeats: int) -> list[Bar]:
    rows, none, generate_rows, generate = interleaved(
        [
            _rate(NUM_TOKENS, lambda: served.chat(TASK, NUM_TOKENS, rows=True)),
            _rate(NUM_TOKENS, lambda: served.chat(TASK, NUM_TOKENS, rows=False)),
            _rate(NUM_TOKENS, lambda: reference.generate([TASK], NUM_TOKENS, output_logits=True)),
            _rate(NUM_TOKENS, lambda: reference.generate([TASK], NUM_TOKENS, output_logits=False)),
        ],
        repeats,
    )
    numbers = f"{rows:.1f} tokens/s, generate {generate_rows:.1f}"
    return [
        Bar("solo decode, rows to a client", rows / generate_rows, 1.0, False, "x", numbers),
        Bar(
            "cost of asking for rows",
            (none / rows - 1) * 100,
            5,
            True,
            " %",
            f"{none:.1f} tokens/s without rows",
        ),
        Bar(
            "cost of the server, no rows",
            (generate / none - 1) * 100,
            3,
            True,
            " %",
            f"{none:.1f} tokens/s, generate {generate:.1f}",
        ),
    ]


def _eight(served: Served, reference: Reference, repeats: int) -> list[Bar]:
    total = 8 * NUM_TOKENS
    rows, none, generate = interleaved(
        [
            _rate(total, lambda: served.at_once(8, rows=True)),
            _rate(total, lambda: served.at_once(8, rows=False)),
            _rate(total, lambda: reference.generate([TASK] * 8, NUM_TOKENS, output_logits=True)),
        ],
        repeats,
    )
    numbers = f"{rows:.1f} tokens/s, generate {generate:.1f}"
    return [
        Bar("8 equal requests at once", rows / generate, 1.2, False, "x", numbers),
        Bar(
            "cost of asking for rows, 8 at once",
            (none / rows - 1) * 100,
            5,
            True,
            " %",
            f"{none:.1f} tokens/s without rows",
        ),
    ]


def _mixed(served: Served, reference: Reference, repeats: int) -> list[Bar]:
    load = mixed_load()
    total = sum(work.num_tokens for work in load)
    ours: list[tuple[float, float]] = []
    theirs: list[tuple[float, float]] = []
    for _ in range(repeats):
        for results, serve in ((ours, served.load), (theirs, reference.static_batches)):
            took, latencies = serve(load)
            results.append((total / took, statistics.median(latencies)))
    rate, latency = (statistics.median(each) for each in zip(*ours, strict=True))
    static_rate, static_latency = (statistics.median(each) for each in zip(*theirs, strict=True))
    return [
        Bar(
            "32 mixed requests, total rate",
            rate / static_rate,
            2,
            False,
            "x",
            f"{rate:.1f} tokens/s, static batches {static_rate:.1f}",
        ),
        Bar(
            "32 mixed requests, median latency",
            static_latency / latency,
            3,
            False,
            "x",
            f"{latency:.1f} s, static batches {static_latency:.1f} s",
        ),
    ]
