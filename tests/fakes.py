"""Scripted models that misbehave on demand."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.engine import Load
from engine.fake import CHAT_TEMPLATE, SPECIAL_TOKENS, ScriptedRunner, byte_tokenizer
from engine.types import ModelInfo
from engine.worker import Model

VOCAB_SIZE = 300


class HookedRunner(ScriptedRunner):
    """Calls a hook with (place in the script, row) before each row is given out; it may raise or write."""

    def __init__(self, *args: Any, hook: Callable[[int, torch.Tensor], None], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._hook = hook
        self.released: list[int] = []

    def _row(self, place: int) -> torch.Tensor:
        row = super()._row(place)
        self._hook(place, row)
        return row

    def close(self, sequence_id: int) -> None:
        self.released.append(sequence_id)
        super().close(sequence_id)


def hooked_load(
    hook: Callable[[int, torch.Tensor], None] = lambda place, row: None,
    *,
    script: str | Sequence[int] = "abcdefgh",
    vocab_size: int = VOCAB_SIZE,
    dtype: torch.dtype = torch.float32,
    max_model_len: int = 4096,
    chat_template: str = CHAT_TEMPLATE,
) -> Load:
    """Return a loader of a scripted model with a hook."""

    def load(config: EngineConfig) -> tuple[Model, ModelInfo]:
        tokenizer = byte_tokenizer(chat_template)
        ids = tokenizer.encode(script) if isinstance(script, str) else script
        eos = tokenizer.eos_token_id
        assert eos is not None
        runner = HookedRunner(ids, eos_token_id=eos, vocab_size=vocab_size, dtype=dtype, hook=hook)
        model = Model(runner, tokenizer, frozenset({eos}), max_model_len)
        info = ModelInfo(
            name="hooked",
            vocab_size=vocab_size,
            tokenizer_vocab_size=tokenizer.vocab_size,
            dtype=runner.dtype,
            max_model_len=max_model_len,
        )
        return model, info

    return load


def plain_text(max_size: int) -> st.SearchStrategy[str]:
    """Return texts without the names of special tokens, which hypothesis finds in the source and tries."""
    texts = st.text(max_size=max_size)
    return texts.filter(lambda text: not any(token in text for token in SPECIAL_TOKENS))
