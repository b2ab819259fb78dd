"""Given tokens over HTTP against forward passes in this process: the same model, dtype and threads."""

import http.client
import json
import random
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from transformers import AutoModelForCausalLM

from engine.config import EngineConfig
from engine.divergence import divergences
from engine.loading import embedded_checkpoint
from logitwire.arrow import MEDIA_TYPE, read_table
from ops.bench.bars import Bar, Options, interleaved, seconds
from ops.process import ServerProcess

NUM_ROWS = 1000
NUM_COMPARED = 300
CONTEXT_LENGTHS = (50, 90)
NUM_ECHOES, ECHO_TOKENS = 200, 60
BASE_IDS = range(1000, 40_000)
"""Ids of plain text in the embedded model's vocabulary."""


class Given:
    """Random tokens, never the same ones twice, so that no cache helps anybody."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)  # noqa: S311 - a load, no secret

    def ids(self, num: int) -> list[int]:
        """Return so many ids."""
        return self._chance.choices(BASE_IDS, k=num)


class Served:
    """The server in a process of its own."""

    def __init__(self, url: str, given: Given) -> None:
        self._netloc = urlsplit(url).netloc
        self._given = given

    def _post(self, path: str, body: dict[str, Any], accept: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(self._netloc)
        headers = {"content-type": "application/json", "accept": accept}
        connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        assert response.status == 200, response.read()
        return response

    def rows(self) -> None:
        """Receive the float16 rows of one sequence."""
        body = {"sequences": [{"token_ids": self._given.ids(NUM_ROWS)}]}
        with self._post("/v1/logits", body, MEDIA_TYPE) as response:
            table = read_table(response.readinto, max_rows=NUM_ROWS)
        assert table.logits is not None
        assert len(table.logits) == NUM_ROWS - 1

    def compare(self) -> None:
        """Compare two contexts over one completion."""
        p, q = ({"token_ids": self._given.ids(num)} for num in CONTEXT_LENGTHS)
        completion = {"token_ids": self._given.ids(NUM_COMPARED)}
        with self._post("/v1/divergence", {"p": p, "q": q, "completion": completion}, "*/*") as response:
            assert len(json.load(response)["jsd"]) == NUM_COMPARED

    def echoes(self, at_once: int, num: int = NUM_ECHOES) -> None:
        """Score many short texts, as evaluation harnesses do."""

        def echo(ids: list[int]) -> None:
            body = {"prompt": ids, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
            with self._post("/v1/completions", body, "*/*") as response:
                logprobs = json.load(response)["choices"][0]["logprobs"]
            assert len(logprobs["token_logprobs"]) == ECHO_TOKENS + 1

        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(echo, [self._given.ids(ECHO_TOKENS) for _ in range(num)]))


class Reference:
    """Forward passes in this process, one sequence at a time."""

    def __init__(self, given: Given) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(embedded_checkpoint(EngineConfig.cache_dir)).eval()
        self._given = given

    def _forward(self, ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            rows: torch.Tensor = self._model(torch.tensor([ids]), use_cache=False).logits[0]
        return rows

    def rows(self) -> None:
        """Compute the rows of one sequence, and copy them to host memory."""
        self._forward(self._given.ids(NUM_ROWS)).numpy().copy()

    def compare(self) -> None:
        """Run both contexts, and do the arithmetic."""
        completion = self._given.ids(NUM_COMPARED)
        rows = [
            self._forward(self._given.ids(num) + completion)[num - 1 : -1].clone() for num in CONTEXT_LENGTHS
        ]
        assert len(divergences(rows[0], rows[1], completion)) == NUM_COMPARED

    def echoes(self) -> None:
        """Score some short texts, one after the other."""
        for _ in range(NUM_ECHOES // 4):
            ids = self._given.ids(ECHO_TOKENS)
            logprobs = torch.log_softmax(self._forward(ids), -1)
            logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None])


def run(options: Options) -> list[Bar]:
    """Measure rows, divergences and echoes."""
    torch.set_num_threads(options.threads)
    reference = Reference(Given(1))
    with tempfile.TemporaryDirectory() as folder:
        server = ServerProcess(Path(folder) / "log", THREADS=str(options.threads), MAX_BATCH_SIZE="32")
        try:
            return _bars(Served(server.url, Given(2)), reference, options.repeats)
        finally:
            server.stop()


def _bars(served: Served, reference: Reference, repeats: int) -> list[Bar]:
    rows, plain_rows = interleaved(
        [_rate(NUM_ROWS - 1, served.rows), _rate(NUM_ROWS - 1, reference.rows)], repeats
    )
    compared, plain_compared = interleaved(
        [_rate(NUM_COMPARED, served.compare), _rate(NUM_COMPARED, reference.compare)], repeats
    )
    # So many requests need neither a warm-up of that length nor a repeat.
    served.echoes(8, 8)
    eight, many = (_rate(NUM_ECHOES, partial(served.echoes, at_once))() for at_once in (8, 32))
    plain = _rate(NUM_ECHOES // 4, reference.echoes)()
    return [
        Bar(
            "rows of 1,000 given tokens, to a client",
            rows / plain_rows,
            0.8,
            False,
            "x",
            f"{rows:.1f} rows/s, a forward pass with a copy {plain_rows:.1f}",
        ),
        Bar(
            "divergence of two contexts",
            compared / plain_compared,
            0.9,
            False,
            "x",
            f"{compared:.1f} tokens/s, two forward passes and the arithmetic {plain_compared:.1f}",
        ),
        *(
            Bar(
                f"echo scoring, {num} at once",
                rate / plain,
                1,
                False,
                "x",
                f"{rate:.1f} requests/s of {ECHO_TOKENS} tokens, forward passes alone {plain:.1f}",
            )
            for num, rate in ((8, eight), (32, many))
        ),
    ]


def _rate(num: int, call: Callable[[], None]) -> Callable[[], float]:
    return lambda: num / seconds(call)
