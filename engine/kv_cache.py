"""A KV cache in slots: every running sequence has a row of its own, with its own length.

Sequences join and leave without a copy of the others, and a forward pass over rows ``0..B-1`` sees a view of
the storage. What a row may look at is said by a mask (:func:`attention_masks`), not by padding.
"""

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PretrainedConfig

BLOCK_TOKENS = 256
"""Capacity grows in steps of this."""

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class Pass:
    """Which tokens one forward pass adds, (n, T) with the tokens of each row at the right end.

    Attributes:
        slots: The slot of each row.
        starts: Tokens that each slot holds already.
        lengths: Tokens that each row adds, 1 to T.
        width: Tokens of the longest row afterwards.
    """

    slots: Sequence[int]
    starts: Sequence[int]
    lengths: Sequence[int]
    width: int


class SlotCache(Cache):  # type: ignore[misc]
    """Keys and values of all layers, (slots, heads, capacity, head_dim) each.

    The storage of a layer is made at its first update, in the shape, dtype and place that it needs.
    """

    def __init__(self, num_slots: int, capacity: int) -> None:
        super().__init__(layers=[])
        self.num_slots = num_slots
        self.capacity = capacity
        self._storage: dict[int, list[Tensor]] = {}
        self._pass: Pass | None = None
        self._rows: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._is_prefix = False

    def begin(self, forward: Pass) -> None:
        """Say what the next forward pass is going to write, and where."""
        self._pass = forward
        self._rows = {}
        # The first slots in order need no gathering.
        self._is_prefix = list(forward.slots) == list(range(len(forward.slots)))

    # What Transformers calls.

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the new keys and values of one layer; return all that the rows of this pass may look at."""
        assert self._pass is not None
        new = [key_states, value_states]
        if layer_idx not in self._storage:
            self._storage[layer_idx] = [self._empty(each, self.num_slots, self.capacity) for each in new]
        keys, values = (self._write(*pair) for pair in zip(self._storage[layer_idx], new, strict=True))
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: lengths differ by row, and positions are always given."""
        return 0

    def get_query_offset(self, layer_idx: int | None = 0) -> int:
        """Return 0: masks are always given."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return the length and offset of the keys that a pass sees."""
        assert self._pass is not None
        return self._pass.width, 0

    # Storage.

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token of one slot takes over all layers."""
        tensors = [each for pair in self._storage.values() for each in pair]
        return sum(each[0, :, 0].numel() * each.element_size() for each in tensors)

    def resize(self, num_slots: int, capacity: int, lengths: Sequence[int]) -> None:
        """Change the size; what fits is kept.

        Args:
            num_slots: Afterwards.
            capacity: Afterwards.
            lengths: Tokens that each slot holds. No others are touched, so memory is taken by tokens only.
        """
        kept = [min(capacity, length) for length in lengths[:num_slots]]
        for pair in self._storage.values():
            for place, old in enumerate(pair):
                new = self._empty(old, num_slots, capacity)
                for slot, length in enumerate(kept):
                    new[slot, :, :length] = old[slot, :, :length]
                pair[place] = new
        self.num_slots, self.capacity = num_slots, capacity

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first tokens of one slot to another."""
        for pair in self._storage.values():
            for each in pair:
                each[target, :, :num_tokens] = each[source, :, :num_tokens]

    def swap(self, one: int, other: int, num_tokens: int) -> None:
        """Exchange the first tokens of two slots."""
        for pair in self._storage.values():
            for each in pair:
                kept = each[one, :, :num_tokens].clone()
                each[one, :, :num_tokens] = each[other, :, :num_tokens]
                each[other, :, :num_tokens] = kept

    def drop(self) -> None:
        """Free the storage; the next update makes it anew."""
        self._storage.clear()
        self._rows = {}

    def _empty(self, like: Tensor, num_slots: int, capacity: int) -> Tensor:
        shape = (num_slots, like.shape[1], capacity, like.shape[3])
        # Zeros, since a masked NaN is still a NaN in a weighted sum.
        if like.device.type != "cpu" or 0 in shape:
            return like.new_zeros(shape)
        # Pages of its own, which are given back when it has been replaced by a larger one. On the heap each
        # size would leave a hole that the next one does not fit. The kernel's pages are zeros.
        size = math.prod(shape) * like.element_size()
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(pages, dtype=like.dtype).view(shape)

    def _write(self, storage: Tensor, new: Tensor) -> Tensor:
        """Write (n, H, T, D) into the rows' places; return (n, H, width, D)."""
        forward = self._pass
        assert forward is not None
        num = len(forward.slots)
        if new.shape[2] == 1 and num > 1:
            rows, at = self._indices(storage.device)
            storage[rows, :, at] = new[:, :, 0]
        else:
            for row, slot in enumerate(forward.slots):
                start, length = forward.starts[row], forward.lengths[row]
                storage[slot, :, start : start + length] = new[row, :, new.shape[2] - length :]
        if self._is_prefix:
            return storage[:num, :, : forward.width]
        if num == 1:
            slot = forward.slots[0]
            return storage[slot : slot + 1, :, : forward.width]
        rows, _ = self._indices(storage.device)
        return storage[:, :, : forward.width].index_select(0, rows)

    def _indices(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return slots and first positions of this pass's rows, int64 (n,)."""
        assert self._pass is not None
        if device not in self._rows:
            self._rows[device] = (
                torch.tensor(list(self._pass.slots), device=device),
                torch.tensor(list(self._pass.starts), device=device),
            )
        return self._rows[device]


def layer_kinds(config: PretrainedConfig) -> list[str] | str | None:
    """Return which masks a model's forward takes.

    Returns:
        A list of layer types, if it takes a dict of masks; one type, if it takes one mask; ``None``, if some
        layers keep a state that is no sequence of keys and values.
    """
    config = config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return sorted(set(kinds)) if set(kinds) <= {FULL, SLIDING} else None
    if getattr(config, "attention_chunk_size", None) is not None:
        return None
    return FULL if getattr(config, "sliding_window", None) is None else SLIDING


def attention_masks(
    config: PretrainedConfig, positions: Tensor, width: int, dtype: torch.dtype
) -> Tensor | dict[str, Tensor]:
    """Return what each query may look at: keys up to its own position, within the window if there is one.

    Args:
        config: Of the model; says which kinds of layers there are.
        positions: int64 (n, T), on device.
        width: Keys per row.
        dtype: Of the model.

    Returns:
        ``dtype`` (n, 1, T, width), to be added to the scores: 0 = may look, else the lowest number. Every
        kind of attention takes that, and a boolean mask would be turned into it once per layer. A dict by
        layer type, if the model wants one.
    """
    kinds = layer_kinds(config)
    assert kinds is not None
    names = [kinds] if isinstance(kinds, str) else kinds
    keys = torch.arange(width, device=positions.device)
    distance = positions[:, None, :, None] - keys  # (n, 1, T, width)
    masks = {}
    for name in names:
        hidden = distance < 0
        if name == SLIDING:
            hidden |= distance >= config.get_text_config().sliding_window
        mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
        masks[name] = mask.masked_fill_(hidden, torch.finfo(dtype).min)
    return masks[kinds] if isinstance(kinds, str) else masks
