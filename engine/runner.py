"""Forward passes over one model, with a KV cache per sequence. The only file that knows the device."""

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel


class Runner(Protocol):
    """What the worker needs of a model; :class:`ModelRunner` is the real one."""

    vocab_size: int
    dtype: str
    device: torch.device

    def prefill(self, sequence_id: int, token_ids: Sequence[int]) -> Tensor:
        """Run a prompt; return the raw row (V,) that predicts its next token."""
        ...

    def decode(self, sequence_id: int, token_id: int) -> Tensor:
        """Run one more token of a sequence; return the raw row (V,) that predicts the next one."""
        ...

    def release(self, sequence_id: int) -> None:
        """Forget a sequence, if it is known."""
        ...

    def recover(self) -> None:
        """Give memory back after an out-of-memory error."""
        ...


class ModelRunner:
    """Runs a Transformers causal language model, each sequence on its own cache."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._caches: dict[int, Any] = {}
        parameters = inspect.signature(model.forward).parameters
        # Transformers 5.24 renamed the argument; both names work here.
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self.device = model.get_input_embeddings().weight.device
        row = self.prefill(-1, [0])
        self.release(-1)
        self.vocab_size = row.shape[-1]
        self.dtype = str(row.dtype).removeprefix("torch.")

    def prefill(self, sequence_id: int, token_ids: Sequence[int]) -> Tensor:
        """Run a prompt on a fresh cache; see :class:`Runner`."""
        self._caches[sequence_id] = DynamicCache(config=self._model.config)
        return self._forward(sequence_id, token_ids)

    def decode(self, sequence_id: int, token_id: int) -> Tensor:
        """Run one more token; see :class:`Runner`."""
        return self._forward(sequence_id, [token_id])

    def release(self, sequence_id: int) -> None:
        """Drop a sequence's cache."""
        self._caches.pop(sequence_id, None)

    def recover(self) -> None:
        """Hand cached blocks back to the device."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _forward(self, sequence_id: int, token_ids: Sequence[int]) -> Tensor:
        input_ids = torch.tensor([list(token_ids)], device=self.device)  # (1, T)
        with torch.inference_mode():
            output = self._model(
                input_ids=input_ids,
                use_cache=True,
                **{self._cache_name: self._caches[sequence_id]},
                **self._last_only,
            )
        row: Tensor = output.logits[0, -1]  # (V,)
        return row
