"""What each number costs that a request can ask for, and that those nobody asked for cost nothing.

The model costs nothing here, so a step is the engine's own work: fault scan, choice, what was asked for, and
the delivery.
"""

import asyncio
from dataclasses import replace
from functools import partial
from unittest import mock

import torch

from engine import worker
from engine.config import EngineConfig
from engine.engine import Engine
from engine.types import Finish, GenerationRequest, RowDtype, SamplingParams
from ops.bench.bars import Bar, Options, interleaved, seconds
from ops.bench.transport_server import VOCAB_SIZE, load

NUM_TOKENS = 300

PLAIN = GenerationRequest(
    request_id="plain",
    prompt_token_ids=(1,),
    max_tokens=NUM_TOKENS,
    sampling=SamplingParams(temperature=0),
)
ASKED = {
    "nothing": PLAIN,
    "logprobs": replace(PLAIN, logprobs=True),
    "20 alternatives": replace(PLAIN, logprobs=True, num_top_logprobs=20),
    "statistics": replace(PLAIN, token_stats=True),
    "float16 rows": replace(PLAIN, row_dtype=RowDtype.FLOAT16, held_bytes=1),
}


class _NoExtracts:
    """Takes nothing off the device; what a step would be if nobody could ask for anything."""

    def __init__(self, *_: object) -> None:
        nothing: dict[int, object] = {}
        self.logprobs = self.top_logprobs = self.stats = self.selected = self.rows = nothing
        self.ranks = self.id_logprobs = nothing


def run(options: Options) -> list[Bar]:
    """Measure steps of one sequence in this process."""
    torch.set_num_threads(options.threads)
    return asyncio.run(_run(options))


async def _run(options: Options) -> list[Bar]:
    engine = Engine(EngineConfig(outbox_bytes=2**31, row_budget_bytes=2**31), load)
    engine.start()
    await engine.wait_ready()
    loop = asyncio.get_running_loop()

    def step_us(request: GenerationRequest, *, is_bare: bool = False) -> float:
        def once() -> None:
            asyncio.run_coroutine_threadsafe(_generate(engine, request), loop).result()

        if not is_bare:
            return seconds(once) / NUM_TOKENS * 1e6
        with mock.patch.object(worker, "Extracts", _NoExtracts):
            return seconds(once) / NUM_TOKENS * 1e6

    calls = [partial(step_us, request) for request in ASKED.values()]
    calls.append(partial(step_us, PLAIN, is_bare=True))
    *asked, bare = await asyncio.to_thread(interleaved, calls, options.repeats)
    await engine.stop()
    costs = ", ".join(f"{name} {us:.0f} us" for name, us in zip(ASKED, asked, strict=True))
    note = f"V = {VOCAB_SIZE:,}, a step with {costs}; without the code for any of it {bare:.0f} us"
    return [Bar("cost of numbers that nobody asked for", (asked[0] / bare - 1) * 100, 5, True, " %", note)]


async def _generate(engine: Engine, request: GenerationRequest) -> None:
    outbox = engine.submit(request)
    try:
        while not isinstance((await outbox.take())[-1], Finish):
            pass
    finally:
        engine.cancel(request.request_id)
