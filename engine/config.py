"""Every knob of the engine, checked once at construction."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

AUTOMATIC_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
"""Words for which Accelerate places the layers itself."""

DISK = "disk"
"""Where a device map puts a layer that is read anew for each step."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What to load and how much to run at once. The service fills it from its settings."""

    model_name: str = ""
    """Checkpoint name or folder; empty is the embedded model, ``scripted`` a fake one."""
    dtype: str = "auto"
    device_map: str = "auto"
    """What :func:`parse_device_map` reads."""
    offload_dir: str = ""
    """Folder for layers on the disk; empty allows none there."""
    check_memory: bool = True
    """Refuse a model that cannot fit before its weights are read."""
    attn_implementation: str = "sdpa"
    """``sdpa`` is ``eager`` for models without it."""
    quantization: str = ""
    """Empty, ``4bit`` or ``8bit``."""
    trust_remote_code: bool = False
    pack_weights: bool = True
    """Reorder float32 weights on the CPU for speed; takes as much memory again."""
    cache_dir: Path = Path("~/.cache/logitwire")
    """Where the embedded model is kept in converted form."""
    max_model_len: int = 0
    """Tokens; 0 takes the model's own limit."""
    max_batch_size: int = 16
    """Sequences that run at once."""
    max_queue: int = 256
    """Requests that wait at most."""
    prefill_chunk: int = 512
    """Tokens of prompts that are run between two decode steps."""
    kv_cache_bytes: int = 0
    """Bytes of keys and values at most; 0 is 80 % of the free memory, on the CPU 4 GiB at most."""
    row_budget_bytes: int = 2 * 2**30
    """Bytes of rows that all running requests together may hold."""
    deadline_s: float = 0.0
    """Seconds that a request may wait and run; 0 is no limit."""
    outbox_bytes: int = 32 * 2**20
    """Bytes of rows that one request may have undelivered before it pauses."""
    stall_timeout_s: float = 60.0
    """Seconds for which a full outbox may stay full."""
    threads: int = 0
    """Threads of a forward pass on the CPU; 0 leaves torch's own choice."""
    skip_tokenizer: bool = False
    """Load no tokenizer; ids alone come and go."""
    script: str = "Hello from the scripted model."
    """What the scripted model says."""

    def __post_init__(self) -> None:
        """Refuse sizes that could never work.

        Raises:
            ValueError: A size is below its least useful value.
        """
        for name in ("max_batch_size", "max_queue", "prefill_chunk", "outbox_bytes", "stall_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive")
        for name in ("max_model_len", "threads", "kv_cache_bytes", "row_budget_bytes", "deadline_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative")
        places = parse_device_map(self.device_map)
        if not isinstance(places, str) and DISK in places.values() and not self.offload_dir:
            raise ValueError("a device map that names the disk needs a folder: offload_dir")


def parse_device_map(text: str) -> str | Mapping[str, str]:
    """Return where the layers go.

    Args:
        text: One of Accelerate's words, a device of torch, the number of a GPU, or a JSON object from the
            names of modules to devices or ``disk``.

    Raises:
        ValueError: It is none of these.
    """
    if not text.lstrip().startswith("{"):
        return f"cuda:{text}" if text.isdecimal() else text
    try:
        places = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from error
    if not places or not all(isinstance(place, str | int) for place in places.values()):
        raise ValueError("expected a JSON object from the names of modules to devices")
    if "" in places and len(places) > 1:
        raise ValueError("the empty name stands for the whole model, so it cannot stand beside others")
    return {name: parse_device_map(str(place)) for name, place in places.items()}  # type: ignore[misc]
