"""The storage of keys and values: what it keeps when its size changes, and what memory it takes."""

import re
import sys
from pathlib import Path

import pytest
import torch

from engine.kv_cache import Pass, SlotCache


def filled(cache: SlotCache, lengths: list[int]) -> torch.Tensor:
    """Write so many tokens into each slot of one layer; return them, (slots, 2, longest, 64)."""
    tokens = torch.randn(len(lengths), 2, max(lengths), 64)
    for slot, length in enumerate(lengths):
        cache.begin(Pass([slot], [0], [length], length))
        cache.update(tokens[slot : slot + 1, :, :length], tokens[slot : slot + 1, :, :length], 0)
    return tokens


def held(cache: SlotCache, slot: int, length: int) -> torch.Tensor:
    """Return the keys of a slot, (1, 2, length, 64), and add one token behind them."""
    cache.begin(Pass([slot], [length], [1], length + 1))
    one = torch.zeros(1, 2, 1, 64)
    return cache.update(one, one, 0)[0][:, :, :length]


@pytest.mark.parametrize(("num_slots", "capacity"), [(3, 512), (2, 512), (5, 256), (3, 64)])
def test_what_fits_is_kept_when_the_size_changes(num_slots: int, capacity: int) -> None:
    cache = SlotCache(3, 256)
    lengths = [200, 0, 7]
    tokens = filled(cache, lengths[:1] + [1] + lengths[2:])
    cache.resize(num_slots, capacity, lengths)
    for slot in range(min(3, num_slots)):
        kept = min(lengths[slot], capacity - 1)
        assert torch.equal(held(cache, slot, kept)[0], tokens[slot, :, :kept])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_taken_by_tokens_and_given_back() -> None:
    def resident() -> int:
        return int(re.findall(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[0]) * 1024

    before = resident()
    cache = SlotCache(16, 256)
    filled(cache, [100] * 16)
    for capacity in range(512, 16_384, 512):
        cache.resize(16, capacity, [100] * 16)
    # 16 slots of 16,000 tokens would be 268 MB, and each size before them a little less.
    assert resident() - before < 32 * 2**20
