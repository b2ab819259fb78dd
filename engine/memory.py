"""How much memory is free for this process, and whether a model fits into it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from engine.config import AUTOMATIC_MAPS, DISK, EngineConfig, parse_device_map
from engine.errors import LoadError
from engine.estimate import Need, describe, gib

SPARED = 0.9
"""How much of a device Transformers fills with weights."""


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
    if not free.is_limited:
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
            f"the weights are not packed, which would take {gib(need.packable)} beside {gib(need.total)};"
            f" free are {gib(free.host)}"
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
    return (
        f"the model cannot fit{f' on {place}' if place else ''}: it needs {gib(size)}"
        f" ({describe(need, config)}), and free are {where}. What helps: {'; '.join(remedies)}."
        " CHECK_MEMORY=false loads it nevertheless"
    )
