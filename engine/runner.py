"""Forward passes over one model. With the KV cache, the only file that knows the device."""

import inspect
import itertools
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from engine.kv_cache import BLOCK_TOKENS, Pass, SlotCache, attention_masks, layer_kinds

logger = logging.getLogger(__name__)


class CacheFullError(Exception):
    """The KV budget has no room; fewer sequences must run. Never leaves the engine."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one sequence to run next; those before them have been run."""

    sequence_id: int
    token_ids: Sequence[int]


class Runner(Protocol):
    """What the worker needs of a model.

    Attributes:
        vocab_size: V, the width of a row.
        dtype: Of the rows, such as ``bfloat16``.
        device: Where the rows are.
        is_batched: Whether one forward pass serves several sequences.
        capacity_tokens: Tokens whose keys and values it holds at most, over all sequences; 0 is no limit.
    """

    vocab_size: int
    dtype: str
    device: torch.device
    is_batched: bool
    capacity_tokens: int

    def open(self, sequence_id: int, token_ids: Sequence[int], *, max_reused: int | None = None) -> int:
        """Make a place for a sequence that is going to run these tokens.

        Args:
            sequence_id: A new one.
            token_ids: At least one.
            max_reused: How many of the first tokens may come from what other sequences have run; ``None`` is
                all but the last.

        Returns:
            How many of the first tokens need not be run, since their keys and values are known; always fewer
            than there are.

        Raises:
            CacheFullError: There is no room now.
        """
        ...

    def forward(self, chunks: Sequence[Chunk]) -> Tensor:
        """Run more tokens of one or several sequences.

        Returns:
            (n, V), on device: row i is the raw distribution behind the last token of chunk i.

        Raises:
            CacheFullError: There is no room for so many tokens; nothing was run.
        """
        ...

    def forward_rows(self, chunks: Sequence[Chunk], keep: Sequence[int]) -> list[Tensor]:
        """Run more tokens of one or several sequences, like :meth:`forward`, and return several rows of each.

        Args:
            chunks: What to run.
            keep: How many rows of each chunk are wanted, 1 to its number of tokens.

        Returns:
            (keep, V) of each chunk, on device: the raw distributions behind its last tokens. They may share
            memory; none of it is used again here.

        Raises:
            CacheFullError: As :meth:`forward`.
        """
        ...

    def close(self, sequence_id: int) -> None:
        """Free the place of a sequence, if it has one. What it ran may serve a later sequence."""
        ...

    def recover(self) -> None:
        """Give memory back after an out-of-memory error; what was run before is forgotten."""
        ...


class _ModelForward:
    """The model's forward with the arguments that this version of Transformers takes."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        parameters = inspect.signature(model.forward).parameters
        # Transformers 5.24 renamed the argument; both names work here.
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._keeps_some = "logits_to_keep" in parameters
        self.takes_positions = "position_ids" in parameters

    def __call__(self, input_ids: Tensor, cache: Any, *, keep: int = 1, **arguments: Any) -> Tensor:
        """Return the raw rows (n, keep, V) behind the last columns of ``input_ids`` (n, T)."""
        if self._keeps_some:
            arguments["logits_to_keep"] = keep
        with torch.inference_mode():
            output = self._model(
                input_ids=input_ids,
                use_cache=True,
                **{self._cache_name: cache},
                **arguments,
            )
        rows: Tensor = output.logits[:, -keep:]
        return rows


def input_device(model: PreTrainedModel) -> torch.device:
    """Return where a model takes its token ids; an offloaded embedding itself is nowhere."""
    embedding = model.get_input_embeddings()
    place = getattr(getattr(embedding, "_hf_hook", None), "execution_device", None)
    return torch.device(embedding.weight.device if place is None else place)


class OneAtATimeRunner:
    """Gives each sequence the model's native cache and a forward pass of its own. Works for every model."""

    is_batched = False
    capacity_tokens = 0

    def __init__(self, model: PreTrainedModel) -> None:
        self._config = model.config
        self._forward = _ModelForward(model)
        self._caches: dict[int, Any] = {}
        self.device = input_device(model)
        self.open(-1, [0])
        row = self.forward([Chunk(-1, [0])])
        self.close(-1)
        self.vocab_size = row.shape[-1]
        self.dtype = str(row.dtype).removeprefix("torch.")

    def open(self, sequence_id: int, token_ids: Sequence[int], *, max_reused: int | None = None) -> int:
        """Give a sequence an empty cache; see :class:`Runner`."""
        self._caches[sequence_id] = DynamicCache(config=self._config)
        return 0

    def forward(self, chunks: Sequence[Chunk]) -> Tensor:
        """Run one sequence after the other; see :class:`Runner`."""
        return torch.cat([self._run(chunk, keep=1) for chunk in chunks])

    def forward_rows(self, chunks: Sequence[Chunk], keep: Sequence[int]) -> list[Tensor]:
        """Run one sequence after the other, and keep several rows of each; see :class:`Runner`."""
        return [self._run(chunk, keep=num) for chunk, num in zip(chunks, keep, strict=True)]

    def _run(self, chunk: Chunk, *, keep: int) -> Tensor:
        """Run one sequence; return the last rows (keep, V)."""
        input_ids = torch.tensor([list(chunk.token_ids)], device=self.device)  # (1, T)
        return self._forward(input_ids, self._caches[chunk.sequence_id], keep=keep)[0]

    def close(self, sequence_id: int) -> None:
        """Drop a sequence's cache."""
        self._caches.pop(sequence_id, None)

    def recover(self) -> None:
        """Hand cached blocks back to the device."""
        _empty_device_cache(self.device)


@dataclass(slots=True)
class Slot:
    """A place in the cache, the tokens whose keys and values it holds, and how many are sure to come."""

    token_ids: list[int] = field(default_factory=list)
    sequence_id: int | None = None
    used_at: int = 0
    num_wanted: int = 0


class SlotRunner:
    """Runs all sequences in one forward pass over a cache in slots.

    Running sequences are kept in the first slots, so that a decode step needs no gathering. Those that have
    ended stay behind them until their slot is needed, and new prompts that begin alike start from there.
    """

    is_batched = True

    def __init__(self, model: PreTrainedModel, *, max_slots: int, max_tokens: int, budget_bytes: int) -> None:
        """Prepare an empty cache.

        Args:
            model: One whose layers :func:`engine.kv_cache.layer_kinds` knows.
            max_slots: Sequences at once.
            max_tokens: Tokens of one sequence at most; lowered to what the budget holds.
            budget_bytes: What the cache may take.
        """
        self._config = model.config
        self._dtype = model.dtype
        self._forward = _ModelForward(model)
        self._max_slots = max_slots
        self.max_tokens = max_tokens
        self._clock = itertools.count(1)
        self.device = input_device(model)
        self._cache = SlotCache(1, min(BLOCK_TOKENS, max_tokens))
        self._slots = [Slot()]
        self._place: dict[int, int] = {}
        self._budget_bytes = budget_bytes
        self.open(-1, [0])
        row = self.forward([Chunk(-1, [0])])
        self.close(-1)
        self._slots[0].token_ids.clear()
        self.vocab_size = row.shape[-1]
        self.dtype = str(row.dtype).removeprefix("torch.")
        self.capacity_tokens = min(max_slots * max_tokens, budget_bytes // self._cache.bytes_per_token)
        self.max_tokens = min(max_tokens, self.capacity_tokens)

    @property
    def cache_bytes(self) -> int:
        """Bytes that the cache takes now."""
        return self._cache.bytes_per_token * self._cache.num_slots * self._cache.capacity

    # Places.

    def open(self, sequence_id: int, token_ids: Sequence[int], *, max_reused: int | None = None) -> int:
        """Take a slot, with as many known tokens as can be found; see :class:`Runner`."""
        self._shrink_for(len(self._place) + 1, len(token_ids))
        # The last token is always run, since its row is wanted.
        limit = len(token_ids) - 1 if max_reused is None else min(max_reused, len(token_ids) - 1)
        source, common = self._best_prefix(token_ids[:limit])
        target = self._free_slot(len(token_ids), source, common)
        slot = self._slots[target]
        if source is not None and source != target:
            self._cache.copy(source, target, common)
        slot.token_ids = list(token_ids[:common])
        slot.sequence_id, slot.used_at, slot.num_wanted = sequence_id, next(self._clock), len(token_ids)
        self._place[sequence_id] = target
        return common

    def close(self, sequence_id: int) -> None:
        """Leave the slot to whoever needs it, with its tokens; see :class:`Runner`."""
        place = self._place.pop(sequence_id, None)
        if place is not None:
            self._slots[place].sequence_id = None
            self._slots[place].used_at = next(self._clock)

    def _best_prefix(self, token_ids: Sequence[int]) -> tuple[int | None, int]:
        """Return the slot that shares the longest beginning, and its length."""
        source, common = None, 0
        for place, slot in enumerate(self._slots):
            shared = common_prefix(slot.token_ids, token_ids)
            if shared > common:
                source, common = place, shared
        return source, common

    def _free_slot(self, num_tokens: int, source: int | None, common: int) -> int:
        """Return a slot that nobody uses: the source itself, a new one, or the one used longest ago."""
        free = [place for place, slot in enumerate(self._slots) if slot.sequence_id is None]
        if source in free and (len(free) == 1 or 2 * common >= len(self._slots[source].token_ids)):
            return source
        empty = [place for place in free if not self._slots[place].token_ids]
        if empty:
            return empty[0]
        capacity = max(self._cache.capacity, self._rounded(num_tokens))
        if len(self._slots) < self._max_slots and self._fits(len(self._slots) + 1, capacity):
            self._resize(len(self._slots) + 1, self._cache.capacity)
            return len(self._slots) - 1
        if not free:
            raise CacheFullError
        others = [place for place in free if place != source] or free
        return min(others, key=lambda place: self._slots[place].used_at)

    def _fits(self, num_slots: int, capacity: int) -> bool:
        return num_slots * capacity * self._cache.bytes_per_token <= self._budget_bytes

    def _shrink_for(self, num_slots: int, num_tokens: int) -> None:
        """Let so many sequences fit, the new one of so many tokens; only ended ones lose what they hold.

        Raises:
            CacheFullError: The running ones need the room themselves.
        """
        if self._fits(num_slots, max(self._cache.capacity, self._rounded(num_tokens))):
            return
        running = [self._slots[place] for place in self._place.values()]
        longest = max([num_tokens, *(max(len(slot.token_ids), slot.num_wanted) for slot in running)])
        capacity = self._rounded(longest)
        if running and not self._fits(num_slots, capacity):
            raise CacheFullError
        if capacity >= self._cache.capacity:
            return
        # One long sequence that has ended would else keep all later ones from running side by side.
        self._compact(list(self._place))
        most = self._budget_bytes // max(1, capacity * self._cache.bytes_per_token)
        self._resize(min(len(self._slots), most), capacity)
        for slot in self._slots:
            del slot.token_ids[capacity:]

    def _rounded(self, num_tokens: int) -> int:
        return min(-(-num_tokens // BLOCK_TOKENS) * BLOCK_TOKENS, self.max_tokens)

    def _resize(self, num_slots: int, capacity: int) -> None:
        self._cache.resize(num_slots, capacity, [len(slot.token_ids) for slot in self._slots])
        del self._slots[num_slots:]
        self._slots += [Slot() for _ in range(num_slots - len(self._slots))]

    def _make_room(self, num_tokens: int) -> None:
        """Let every slot hold so many tokens; ended sequences make way.

        Raises:
            CacheFullError: The running ones alone are too many.
        """
        if num_tokens <= self._cache.capacity:
            return
        self._compact(list(self._place))
        capacity = self._rounded(num_tokens)
        num_slots = self._budget_bytes // max(1, capacity * self._cache.bytes_per_token)
        if num_slots < len(self._place):
            raise CacheFullError
        self._resize(min(num_slots, len(self._slots)), capacity)

    def _compact(self, sequence_ids: Sequence[int]) -> None:
        """Move these sequences to the first slots; whoever is there changes places with them."""
        num = len(sequence_ids)
        wanted = set(sequence_ids)
        behind = [each for each in sequence_ids if self._place[each] >= num]
        others = [place for place in range(num) if self._slots[place].sequence_id not in wanted]
        for sequence_id, place in zip(behind, others, strict=True):
            last = self._place[sequence_id]
            one, other = self._slots[place], self._slots[last]
            self._cache.swap(place, last, max(len(one.token_ids), len(other.token_ids)))
            self._slots[place], self._slots[last] = other, one
            self._place[sequence_id] = place
            if one.sequence_id is not None:
                self._place[one.sequence_id] = last

    # Running.

    def forward(self, chunks: Sequence[Chunk]) -> Tensor:
        """Run all chunks in one pass; see :class:`Runner`."""
        return self._run(chunks, keep=1)[:, 0]

    def forward_rows(self, chunks: Sequence[Chunk], keep: Sequence[int]) -> list[Tensor]:
        """Run all chunks in one pass, and keep several rows of each; see :class:`Runner`."""
        # The head runs at the same columns of every row of the pass.
        rows = self._run(chunks, keep=max(keep))
        return [each[-num:] for each, num in zip(rows, keep, strict=True)]

    def _run(self, chunks: Sequence[Chunk], *, keep: int) -> Tensor:
        """Run all chunks in one pass; return the last rows of each, (n, keep, V)."""
        if all(len(chunk.token_ids) == 1 for chunk in chunks):
            # A pass of a few long chunks would gain less from this than the moves cost.
            self._compact([chunk.sequence_id for chunk in chunks])
        self._make_room(max(self._length_after(chunk) for chunk in chunks))
        order = sorted(range(len(chunks)), key=lambda each: self._place[chunks[each].sequence_id])
        ordered = [chunks[each] for each in order]
        slots = [self._place[chunk.sequence_id] for chunk in ordered]
        starts = [len(self._slots[slot].token_ids) for slot in slots]
        lengths = [len(chunk.token_ids) for chunk in ordered]
        width = max(start + length for start, length in zip(starts, lengths, strict=True))
        longest = max(lengths)
        # Tokens stand at the right end of their row, so that the last column holds the last token of each.
        padded = [[0] * (longest - len(chunk.token_ids)) + list(chunk.token_ids) for chunk in ordered]
        input_ids = torch.tensor(padded, device=self.device)  # (n, T)
        columns = torch.arange(longest, device=self.device)
        ends = torch.tensor([s + n for s, n in zip(starts, lengths, strict=True)], device=self.device)
        positions = (ends[:, None] - longest + columns).clamp(min=0)  # (n, T)
        self._cache.begin(Pass(slots, starts, lengths, width))
        masks = attention_masks(self._config, positions, width, self._dtype)
        rows = self._forward(input_ids, self._cache, keep=keep, position_ids=positions, attention_mask=masks)
        for slot, chunk in zip(slots, ordered, strict=True):
            self._slots[slot].token_ids += chunk.token_ids
        if order == sorted(order):
            return rows
        inverse = sorted(range(len(order)), key=order.__getitem__)
        return rows[torch.tensor(inverse, device=rows.device)]

    def _length_after(self, chunk: Chunk) -> int:
        return len(self._slots[self._place[chunk.sequence_id]].token_ids) + len(chunk.token_ids)

    def recover(self) -> None:
        """Free the whole cache; see :class:`Runner`."""
        self._cache.drop()
        self._cache.num_slots, self._cache.capacity = 1, min(BLOCK_TOKENS, self.max_tokens)
        self._slots = [Slot()]
        self._place.clear()
        _empty_device_cache(self.device)


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many first ids two lists share."""
    limit = min(len(one), len(other))
    if list(one[:limit]) == list(other[:limit]):
        return limit
    return next(place for place in range(limit) if one[place] != other[place])


def _empty_device_cache(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


# The choice of a runner.

PROBE_LENGTHS = (7, 29)
PROBE_STEPS = 3
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
"""Allowed difference of a row, relative to its largest value."""


def choose_runner(
    model: PreTrainedModel, *, max_slots: int, max_tokens: int, budget_bytes: int
) -> tuple[Runner, str]:
    """Return a runner that gives the model's own rows, and the reason if it is not the batched one.

    The parity probe runs two rows of unequal length in slots and compares them with plain forward passes.
    """
    if layer_kinds(model.config) is None:
        return OneAtATimeRunner(model), "its layers keep a state that is no sequence of keys and values"
    if not _ModelForward(model).takes_positions:
        return OneAtATimeRunner(model), "its forward pass takes no positions"

    try:
        # Two short rows are no matter for the budget, which may hold one sequence only.
        probe = SlotRunner(model, max_slots=2, max_tokens=max_tokens, budget_bytes=sys.maxsize)
        difference = parity_gap(OneAtATimeRunner(model), probe, max_tokens)
    except Exception as error:
        logger.warning("the parity probe failed", exc_info=error)
        return OneAtATimeRunner(model), f"the parity probe failed with {type(error).__name__}"
    allowed = PROBE_TOLERANCE.get(model.dtype, 1e-3)
    if not difference <= allowed:
        return OneAtATimeRunner(
            model
        ), f"rows in slots differ by {difference:.3g}, and {allowed:g} is allowed"
    return SlotRunner(model, max_slots=max_slots, max_tokens=max_tokens, budget_bytes=budget_bytes), ""


def parity_gap(plain: Runner, batched: Runner, max_tokens: int) -> float:
    """Return the largest difference of rows between two runners, relative to the row's largest value."""
    longest = max(2, min(max_tokens - PROBE_STEPS - 1, max(PROBE_LENGTHS)))
    generator = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(0, min(plain.vocab_size, 1000), (min(length, longest),), generator=generator).tolist()
        for length in PROBE_LENGTHS
    ]

    for runner in (plain, batched):
        for place, prompt in enumerate(prompts):
            runner.open(place, prompt)
    passes = [prompts, *([[step], [step + 5]] for step in range(PROBE_STEPS))]
    gap = 0.0
    for tokens in passes:
        chunks = [Chunk(place, token_ids) for place, token_ids in enumerate(tokens)]
        expected, got = plain.forward(chunks).float(), batched.forward(chunks).float()
        scale = expected.abs().amax(-1).clamp(min=1)
        gap = max(gap, float(((expected - got).abs().amax(-1) / scale).amax()))
    for runner in (plain, batched):
        for place in range(len(prompts)):
            runner.close(place)
    return gap
