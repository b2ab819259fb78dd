"""The servers that cases need: SmolLM2 in a process of its own, and small models made for one fault each."""

import threading
from collections import defaultdict
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.config import EngineConfig
from engine.engine import Load
from engine.fake import EOS_TOKEN, byte_tokenizer
from engine.loading import EMBEDDED_NAME, embedded_checkpoint, model_of
from engine.types import ModelInfo
from engine.worker import Model
from ops.process import ServerProcess
from service.settings import Settings
from tests.cases.runner import SMOLLM2, Target
from tests.fakes import HookedRunner, hooked_load
from tests.model.tiny import tiny_model
from tests.serving import ServerThread

STALL_TIMEOUT_S = 4
OUTBOX_BYTES = 8 * 2**20
KEEPALIVE_S = 0.3

FAILS_AT = 3
"""The place in the answer at which the failing server's model raises."""

STRICT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate: user, assistant, user, ...') }}"
    "{% endif %}{{ message['content'] }}{% endfor %}"
)


class Remote:
    """A server in a process of its own, as a newcomer starts it."""

    model = EMBEDDED_NAME

    def __init__(self, log_path: Path, **environ: str) -> None:
        self._process = ServerProcess(log_path, **environ)
        self.url, self.pid = self._process.url, self._process.pid

    def stop(self) -> None:
        assert self._process.stop() == 0


class Local:
    """A server in a thread of the test process."""

    pid = 0

    def __init__(self, load: Load, **settings: object) -> None:
        self._thread = ServerThread(Settings(**{"port": 0, "drain_timeout": 5.0, **settings}), load)
        self._thread.start()
        self.url, self.model = self._thread.url, self._thread.engine.info.name

    def stop(self) -> None:
        self._thread.stop()


def padded_load(config: EngineConfig) -> tuple[Model, ModelInfo]:
    """Load a model whose head has more rows than the tokenizer has tokens."""
    model = model_of(tiny_model("llama"), byte_tokenizer(), config)
    return model, _info("padded", model)


def strict_load(config: EngineConfig) -> tuple[Model, ModelInfo]:
    """Load a model whose chat template refuses roles that do not alternate."""
    hooked, _ = hooked_load()(config)
    model = Model(hooked.runner, byte_tokenizer(STRICT_TEMPLATE), hooked.eos_token_ids, 512)
    return model, _info("strict", model)


def two_ends_load(config: EngineConfig) -> tuple[Model, ModelInfo]:
    """Load a model with two end tokens, which ends with the one that the tokenizer does not name."""
    tokenizer = byte_tokenizer()
    other, eos = (tokenizer.special_token_id(token) for token in ("<|endoftext|>", EOS_TOKEN))
    assert other is not None
    assert eos is not None
    runner = HookedRunner(
        [*b"abc", other, *b"def"], eos_token_id=eos, vocab_size=300, hook=lambda place, row: None
    )
    model = Model(runner, tokenizer, frozenset({other, eos}), 512)
    return model, _info("two-ends", model)


def _info(name: str, model: Model) -> ModelInfo:
    return ModelInfo(
        name=name,
        vocab_size=model.runner.vocab_size,
        tokenizer_vocab_size=model.tokenizer.vocab_size,
        dtype=model.runner.dtype,
        max_model_len=model.max_model_len,
    )


def _fail(place: int, row: torch.Tensor) -> None:
    if place == FAILS_AT:
        raise ValueError("made to fail")


class Servers:
    """Starts each kind of server when a case first needs it."""

    def __init__(self, folder: Path) -> None:
        self._started: dict[str, Remote | Local] = {}
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._kinds: dict[str, Callable[[], Remote | Local]] = {
            SMOLLM2: lambda: Remote(
                folder / "log",
                THREADS="1",
                STALL_TIMEOUT=str(STALL_TIMEOUT_S),
                OUTBOX_BYTES=str(OUTBOX_BYTES),
            ),
            "one place": lambda: Remote(
                folder / "log-one-place", THREADS="1", MAX_BATCH_SIZE="1", KEEP_ALIVE=str(KEEPALIVE_S)
            ),
            "padded vocabulary": lambda: Local(padded_load, kv_cache_bytes=2**26),
            "strict template": lambda: Local(strict_load),
            "failing step": lambda: Local(hooked_load(_fail)),
            "two end tokens": lambda: Local(two_ends_load),
        }

    def __call__(self, needs: str) -> Target:
        """Return the server of a kind, started."""
        # Memory can be watched where the server has a process of its own.
        kind = SMOLLM2 if needs == "memory probe" else needs
        with self._locks[kind]:
            if kind not in self._started:
                self._started[kind] = self._kinds[kind]()
            return self._started[kind]

    @property
    def names(self) -> set[str]:
        return {*self._kinds, "memory probe"}

    def stop(self) -> None:
        """End all that were started; each must end by itself."""
        for server in self._started.values():
            server.stop()


class Reference:
    """SmolLM2 by Transformers alone, in float32: what the server's numbers are compared with."""

    @cached_property
    def tokenizer(self):  # type: ignore[no-untyped-def]
        return AutoTokenizer.from_pretrained(embedded_checkpoint(EngineConfig.cache_dir))

    @cached_property
    def _model(self):  # type: ignore[no-untyped-def]
        # The servers have the other cores.
        torch.set_num_threads(1)
        path = embedded_checkpoint(EngineConfig.cache_dir)
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def text(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids, clean_up_tokenization_spaces=False))

    def logprobs(self, token_ids: list[int]) -> np.ndarray:
        """Return the float32 (T, V) log-softmax rows of one plain forward pass; row t follows token t."""
        with torch.no_grad():
            logits = self._model(torch.tensor([token_ids])).logits[0]  # (T, V)
        return logits.log_softmax(-1).numpy()
