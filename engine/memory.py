"""How much memory a checkpoint needs, how much there is, and whether the one fits into the other.

All before a weight is read: shapes come from the model built on torch's ``meta`` device, which allocates
nothing. Where an estimate can be wrong it is too small, so that nothing is refused that would fit.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from engine.config import AUTOMATIC_MAPS, DISK, EngineConfig, parse_device_map
from engine.errors import LoadError
from engine.kv_cache import BLOCK_TOKENS, FULL, SLIDING

QUANTIZED_BYTES = {"4bit": 0.5 + 4 / 64, "8bit": 1.0}
"""Of one weight in bitsandbytes; with 4 bits each block of 64 has a float32 scale."""

SPARED = 0.9
"""How much of a device Transformers fills with weights."""


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that a checkpoint takes.

    Attributes:
        weights: By the place that a forced device map names; ``""`` where Accelerate places them.
        packable: Of those, what is packed a second time if it lies on the CPU.
        kv_per_token: Of the KV cache.
        num_parameters: Tied ones once.
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


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that are free now.

    Attributes:
        host: For this process, its control group's limit included.
        gpus: By torch's name, such as ``cuda:0``; only those visible.
        is_limited: Whether a control group leaves the process less than the host has.
    """

    host: int
    gpus: Mapping[str, int] = field(default_factory=dict)
    is_limited: bool = False


@dataclass(frozen=True, slots=True)
class Fit:
    """How a model that fits is to be loaded.

    Attributes:
        pack_weights: Whether the packed copy fits too.
        warnings: What will be slow.
    """

    pack_weights: bool
    warnings: tuple[str, ...] = ()


# What is needed.


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
    if getattr(own, "quantization_config", None) is not None and not source:
        # Built from its configuration it would look like a plain one, several times as large.
        return None
    # A configuration that names no dtype may be of any; two bytes are the fewest that are usual.
    dtype = getattr(own, "dtype", None) or torch.float16
    if config.dtype != "auto":
        dtype = getattr(torch, config.dtype)
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


# What is there.


def room() -> Room:
    """Return the memory that is free for this process."""
    gpus = {}
    if torch.cuda.is_available():
        gpus = {f"cuda:{each}": torch.cuda.mem_get_info(each)[0] for each in range(torch.cuda.device_count())}
    available = psutil.virtual_memory().available
    limit = min([available, *cgroup_limits(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))])
    return Room(host=limit, gpus=gpus, is_limited=limit < available)


def placement_limits(free: Room) -> dict[int | str, int] | None:
    """Return how much Accelerate may put where, if it would count too much; else ``None``.

    It knows no control groups, so on a shared node it would fill the host until the process is killed.
    """
    if not free.gpus or not free.is_limited:
        return None
    # One GPU keeps a tenth for the cache and the activations, as Transformers has it.
    share = SPARED if len(free.gpus) == 1 else 1.0
    gpus: dict[int | str, int] = {place: int(share * there) for place, there in enumerate(free.gpus.values())}
    return {**gpus, "cpu": int(SPARED * free.host)}


def cgroup_limits(membership: Path, root: Path) -> Iterator[int]:
    """Yield what each limit on this process's memory leaves, in bytes; SLURM and containers set some.

    The kernel counts cached files as used; they make way, so they count as free here.

    Args:
        membership: ``/proc/self/cgroup``.
        root: Where control groups of either version are mounted.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, own = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, limit, usage = root, "memory.max", "memory.current"
        if controllers:
            top, limit, usage = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        folder = top / own.lstrip("/")
        # A limit of any group above counts too.
        while folder.is_relative_to(top):
            try:
                most = int((folder / limit).read_text())
                used = int((folder / usage).read_text())
                facts = dict(each.split() for each in (folder / "memory.stat").read_text().splitlines())
            except (OSError, ValueError):
                pass  # No such group as seen from this namespace, or no limit.
            else:
                kinds = ("inactive_file", "active_file")
                cached = sum(int(facts.get(f"total_{kind}", facts.get(kind, 0))) for kind in kinds)
                yield max(0, most - used + cached)
            folder = folder.parent


# Whether it fits.


def fit(need: Need, free: Room, config: EngineConfig) -> Fit:
    """Return how the model is to be loaded.

    Raises:
        LoadError: It cannot fit; the message has the numbers and what can be done.
    """
    is_automatic = parse_device_map(config.device_map) in AUTOMATIC_MAPS
    warnings = _fit_anywhere(need, free, config) if is_automatic else _fit_in_places(need, free, config)
    if not config.pack_weights or not need.packable:
        return Fit(config.pack_weights, warnings)
    is_on_host = set(need.weights) <= {"cpu"} or (is_automatic and not free.gpus)
    if is_on_host and need.total + need.packable > free.host:
        slow = (
            f"the weights are not packed, which would take {gib(need.packable)} beside {gib(need.total)}; free"
            f" are {gib(free.host)}"
        )
        return Fit(False, (*warnings, slow))
    return Fit(True, warnings)


def _fit_anywhere(need: Need, free: Room, config: EngineConfig) -> tuple[str, ...]:
    """Check a model that Accelerate spreads: first over the GPUs, then the host, then the disk."""
    on_gpus = sum(free.gpus.values())
    if need.total <= (on_gpus if free.gpus else free.host):
        return ()
    # Quantized layers work on the device only that they were made for.
    leaves_gpus = bool(free.gpus) and not config.quantization
    if leaves_gpus and need.total <= on_gpus + free.host:
        return (_slow(f"{gib(need.total - on_gpus)} of the model do not fit the GPUs and stay on the host"),)
    if config.offload_dir and not config.quantization:
        rest = need.total - on_gpus - free.host
        return (_slow(f"{gib(rest)} of the model do not fit the memory and stay on the disk"),)
    raise LoadError(_refusal(need, free, config, need.total))


def _fit_in_places(need: Need, free: Room, config: EngineConfig) -> tuple[str, ...]:
    """Check a model whose layers are placed by hand."""
    for place, size in need.weights.items():
        if place == "cpu":
            there = free.host
        elif place.startswith("cuda"):
            name = "cuda:0" if place == "cuda" else place
            if name not in free.gpus:
                seen = ", ".join(free.gpus) or "no GPU"
                raise LoadError(f"DEVICE_MAP={config.device_map}: there is no {name}; torch sees {seen}")
            there = free.gpus[name]
        else:
            continue
        if size + (need.kv if len(need.weights) == 1 else 0) > there:
            raise LoadError(_refusal(need, free, config, size, place))
    if DISK in need.weights:
        return (_slow(f"{gib(need.weights[DISK])} of the model stay on the disk, as DEVICE_MAP says"),)
    return ()


def _slow(what: str) -> str:
    return f"{what}: each step copies them, which is many times slower"


def _refusal(need: Need, free: Room, config: EngineConfig, size: int, place: str = "") -> str:
    """Return the numbers and the remedies of a model that does not fit."""
    where = ", ".join(
        [*(f"{name} {gib(there)}" for name, there in free.gpus.items()), f"host {gib(free.host)}"]
    )
    remedies = ["more or larger GPUs (NUM_GPUS, GPU_IDS)", "a smaller MODEL_NAME"]
    if not config.quantization:
        if need.dtype == "float32":
            remedies.append("DTYPE=bfloat16")
        remedies.append("QUANTIZATION=4bit")
        if not config.offload_dir:
            remedies.append("OFFLOAD_DIR with DEVICE_MAP=auto (slow)")
    kind = f"{need.dtype} quantized to {config.quantization}" if config.quantization else need.dtype
    return (
        f"the model cannot fit{f' on {place}' if place else ''}: it needs {gib(size)} there"
        f" ({need.num_parameters / 1e9:.2f} billion parameters in {kind}: {gib(sum(need.weights.values()))};"
        f" smallest KV cache: {gib(need.kv)}), and free are {where}. What helps: {'; '.join(remedies)}."
        " CHECK_MEMORY=false loads it nevertheless"
    )


def gib(num_bytes: float) -> str:
    """Return a size for a person."""
    return f"{num_bytes / 2**30:.2f} GiB"
