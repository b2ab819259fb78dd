"""A server whose model costs nothing, with raw bytes beside it: ``python -m ops.bench.transport_server``."""

import asyncio
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.engine import Engine
from engine.fake import ScriptedRunner, byte_tokenizer
from engine.runner import Chunk
from engine.types import ModelInfo
from engine.worker import Model
from service.server import run
from service.settings import Settings
from service.tuning import tune_process

VOCAB_SIZE = 152_064
ROW_BYTES = 2 * VOCAB_SIZE
MAX_MODEL_LEN = 10**6


class FreeRunner(ScriptedRunner):
    """Gives out rows that exist already."""

    def forward(self, chunks: Sequence[Chunk]) -> Tensor:
        """Return views where there is one chunk; see :class:`engine.runner.Runner`."""
        if len(chunks) > 1:
            return super().forward(chunks)
        (chunk,) = chunks
        self._num_run[chunk.sequence_id] += len(chunk.token_ids)
        place = self._num_run[chunk.sequence_id] % len(self._pool)
        return self._pool[place : place + 1]


def load(config: EngineConfig) -> tuple[Model, ModelInfo]:
    """Return the free model."""
    tokenizer = byte_tokenizer()
    runner = FreeRunner([], eos_token_id=0, vocab_size=VOCAB_SIZE)
    runner._pool[:, 97] = 30.0
    info = ModelInfo(
        name="free",
        vocab_size=VOCAB_SIZE,
        tokenizer_vocab_size=tokenizer.vocab_size,
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
    )
    return Model(runner, tokenizer, frozenset(), MAX_MODEL_LEN), info


def raw_beside(app: Any) -> Any:
    """Return an app that answers ``/raw/N`` with N chunks of a row's size, and passes on the rest."""
    row = bytes(ROW_BYTES)

    async def with_raw(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/raw/"):
            await app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(int(scope["path"].removeprefix("/raw/"))):
            await send({"type": "http.response.body", "body": row, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return with_raw


if __name__ == "__main__":
    torch.set_num_threads(1)
    tune_process()
    settings = Settings(port=0, max_logit_tokens=10**6)
    asyncio.run(run(settings, Engine(settings.engine_config(), load), wrap=raw_beside))
