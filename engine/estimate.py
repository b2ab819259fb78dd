"""How many bytes a checkpoint needs, before a weight is read.

Shapes come from the model built on torch's ``meta`` device, which allocates nothing. Where an estimate can be
wrong it is too small, so that nothing is refused that would fit.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from engine.config import AUTOMATIC_MAPS, EngineConfig, parse_device_map
from engine.kv_cache import BLOCK_TOKENS, FULL, SLIDING

QUANTIZED_BYTES = {"4bit": 0.5 + 4 / 64, "8bit": 1.0}
"""Of one weight in bitsandbytes; with 4 bits each block of 64 has a float32 scale."""

FILES_SHARE = 0.9
"""Of a checkpoint's files that is loaded at least; some hold layers that nobody uses."""


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that a checkpoint takes.

    Attributes:
        weights: By the place that a forced device map names; ``""`` where Accelerate places them.
        packable: Of those, what is packed a second time if it lies on the CPU.
        kv_per_token: Of the KV cache.
        num_parameters: Tied ones once; 0 if nobody counted them.
        dtype: Of the weights, before quantization.
    """

    weights: Mapping[str, int]
    packable: int
    kv_per_token: int
    num_parameters: int
    dtype: str

    @property
    def kv(self) -> int:
        """Bytes of the smallest KV cache."""
        return self.kv_per_token * BLOCK_TOKENS

    @property
    def total(self) -> int:
        """Bytes of the weights and the smallest KV cache."""
        return sum(self.weights.values()) + self.kv


def estimate(path: str, config: EngineConfig, **source: Any) -> Need | None:
    """Return what a checkpoint needs, or ``None`` if that cannot be told.

    Args:
        path: Name or folder.
        config: Says the dtype, the quantization and the places.
        source: More arguments of ``AutoConfig.from_pretrained``.

    Raises:
        OSError: There is no such checkpoint.
        ValueError: Its configuration is of no known kind.
    """
    own = AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code, **source)
    # A configuration that names no dtype may be of any; two bytes are the fewest that are usual.
    dtype = getattr(own, "dtype", None) or torch.float16
    if config.dtype != "auto":
        dtype = getattr(torch, config.dtype)
    if getattr(own, "quantization_config", None) is not None and not source:
        # Built from its configuration it would look like a plain one, several times as large.
        return _need_of_files(path, own, config, dtype)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                own, dtype=dtype, trust_remote_code=config.trust_remote_code
            )
    except Exception:
        # Code of checkpoints may not bear the meta device. An estimate must never be what stops a load.
        return None
    return _need_of(model, config, dtype)


def _need_of(model: PreTrainedModel, config: EngineConfig, dtype: torch.dtype) -> Need:
    places = parse_device_map(config.device_map)
    tied = getattr(model, "all_tied_weights_keys", {})
    modules = dict(model.named_modules())
    head = model.get_output_embeddings()
    weights: dict[str, float] = {}
    packable = num = 0
    for name, parameter in model.named_parameters():
        parent = modules[name.rpartition(".")[0]]
        is_linear = type(parent) is nn.Linear and name.endswith(".weight")
        if is_linear and parameter.dtype == torch.float32 and (parent is head or not config.quantization):
            packable += parameter.numel() * parameter.element_size()
        if name in tied:
            continue
        num += parameter.numel()
        size: float = parameter.element_size()
        if config.quantization and is_linear and parent is not head:
            size = QUANTIZED_BYTES[config.quantization]
        place = "" if places in AUTOMATIC_MAPS else _place_of(name, places)
        weights[place] = weights.get(place, 0.0) + parameter.numel() * size
    return Need(
        weights={place: int(size) for place, size in weights.items()},
        packable=packable,
        kv_per_token=_kv_bytes_per_token(model.config.get_text_config(), dtype),
        num_parameters=num,
        dtype=str(dtype).removeprefix("torch."),
    )


def _need_of_files(path: str, own: PretrainedConfig, config: EngineConfig, dtype: torch.dtype) -> Need | None:
    """Return what a checkpoint needs by the size of its files, if those are here."""
    places = parse_device_map(config.device_map)
    size = _bytes_of_files(path)
    if not size or not isinstance(places, str):
        return None
    return Need(
        weights={"" if places in AUTOMATIC_MAPS else places: int(FILES_SHARE * size)},
        packable=0,
        kv_per_token=_kv_bytes_per_token(own.get_text_config(), dtype),
        num_parameters=0,
        dtype=str(dtype).removeprefix("torch."),
    )


def _bytes_of_files(path: str) -> int:
    """Return how many bytes of weights a folder or the cache of Hugging Face holds; 0 if it holds none."""
    folder = Path(path)
    if not folder.is_dir():
        cached = try_to_load_from_cache(path, "config.json")
        if not isinstance(cached, str):
            return 0
        folder = Path(cached).parent
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return int(json.loads(index.read_text())["metadata"]["total_size"])
    whole = folder / "model.safetensors"
    return whole.stat().st_size if whole.is_file() else 0


def _place_of(name: str, places: str | Mapping[str, str]) -> str:
    """Return where a forced device map puts a parameter; the longest name that matches wins."""
    if isinstance(places, str):
        return places
    while name not in places and name:
        name = name.rpartition(".")[0]
    return places.get(name, "cpu")


def _kv_bytes_per_token(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """Return the bytes of one token's keys and values; 0 for a configuration with other names."""
    queries: int = getattr(config, "num_attention_heads", None) or 1
    heads: int = getattr(config, "num_key_value_heads", None) or queries
    width: int = getattr(config, "head_dim", None) or 0
    if not width:
        width = getattr(config, "hidden_size", 0) // queries
    kinds: list[str] | None = getattr(config, "layer_types", None)
    layers: int = getattr(config, "num_hidden_layers", 0)
    if kinds is not None:
        layers = sum(kind in (FULL, SLIDING) for kind in kinds)
    itemsize: int = dtype.itemsize
    return 2 * layers * heads * width * itemsize


def describe(need: Need, config: EngineConfig) -> str:
    """Return what takes the memory, for a person."""
    kind = f"{need.dtype} quantized to {config.quantization}" if config.quantization else need.dtype
    counted = f"{need.num_parameters / 1e9:.2f} billion parameters in {kind}"
    weights = counted if need.num_parameters else "weights as their files have them"
    return f"{weights}: {gib(sum(need.weights.values()))}; smallest KV cache: {gib(need.kv)}"


def gib(num_bytes: float) -> str:
    """Return a size for a person."""
    return f"{num_bytes / 2**30:.2f} GiB"
