"""Batching is invisible: in any schedule, each request gets what it gets alone.

Schedules are drawn by hypothesis and driven turn by turn, without a thread, so each one can be repeated. The
cache grows in blocks of 16 tokens and its budget is small, so that sequences also make way for each other.
"""

import asyncio
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from engine import runner as runner_module
from engine.config import EngineConfig
from engine.errors import EngineError
from engine.fake import byte_tokenizer
from engine.inbox import Cancel, Inbox, Submit
from engine.outbox import Outbox
from engine.runner import OneAtATimeRunner, Runner, SlotRunner, choose_runner
from engine.stats import Stats
from engine.types import Finish, FinishReason, GenerationRequest, RowDtype, SamplingParams, TokenEvent
from engine.worker import Model, Worker
from tests.model.tiny import ARCHITECTURES, BATCHED, ONE_AT_A_TIME, tiny_model

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

TOLERANCE = 1e-3
TOKENIZER = byte_tokenizer()
MAX_TOKENS = 128
BLOCK = 16
# Schedules per architecture; more for a night.
EXAMPLES = int(os.environ.get("SCHEDULES", "20"))

tried: Counter[str] = Counter()
largest_gap: dict[str, float] = {}


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner_module, "BLOCK_TOKENS", BLOCK)
        # On matrices this small a second thread only waits for the first.
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)
    sys.stdout.write(f"\nschedules tried: {dict(tried)}\nlargest gap of a row: {largest_gap}\n")


@dataclass(frozen=True)
class Result:
    token_ids: tuple[int, ...]
    texts: tuple[str, ...]
    reason: FinishReason
    stop_reason: str | int | None
    rows: np.ndarray
    logprobs: tuple[float | None, ...]
    num_cached: int
    ended_in: int


@dataclass(frozen=True)
class Plan:
    """A request, the turn in which it comes, the one in which its client leaves, and how it reads."""

    request: GenerationRequest
    arrives: int
    leaves: int | None
    reads_every: int


# Prompts begin alike often, so that prefixes are shared.
prompts = st.builds(
    lambda stem, length, tail: tuple(
        [*(b"Once upon a time in a land far away, " * 2)[:length], *tail][stem:]
    ),
    st.integers(0, 1),
    st.integers(1, 40),
    st.lists(st.integers(0, 255), max_size=12),
).filter(bool)

samplings = st.sampled_from(
    [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0, repetition_penalty=1.7),
        SamplingParams(temperature=1.3),
        SamplingParams(temperature=0.8, top_k=20, top_p=0.9),
        SamplingParams(temperature=2.0, min_p=0.02, repetition_penalty=0.8),
        SamplingParams(temperature=0, frequency_penalty=1.5, presence_penalty=-0.5),
        SamplingParams(temperature=1.0, presence_penalty=2.0, logit_bias=((65, 4.0), (258, -100.0))),
    ]
)

requests = st.builds(
    GenerationRequest,
    request_id=st.just("?"),
    prompt_token_ids=prompts,
    max_tokens=st.integers(1, 24),
    sampling=samplings,
    seed=st.integers(-(2**63), 2**63 - 1),
    stop=st.sampled_from([(), ("a",), ("zz", "\n")]),
    stop_token_ids=st.sampled_from([frozenset(), frozenset(range(60, 70))]),
    min_tokens=st.sampled_from([0, 0, 9]),
    include_stop=st.booleans(),
    priority=st.sampled_from([0, 0, -1, 1]),
    row_dtype=st.just(RowDtype.FLOAT32),
    logprobs=st.booleans(),
)

schedules = st.lists(
    st.builds(
        Plan,
        request=requests,
        arrives=st.integers(0, 12),
        leaves=st.one_of(st.none(), st.none(), st.integers(0, 20)),
        reads_every=st.sampled_from([1, 1, 3]),
    ),
    min_size=2,
    max_size=6,
)


async def drive(
    runner: Runner, plans: list[Plan], *, max_batch_size: int = 3, chunk: int = 8
) -> list[Result | None]:
    """Run a schedule turn by turn; a request whose client leaves gives ``None``."""
    config = EngineConfig(max_batch_size=max_batch_size, prefill_chunk=chunk, stall_timeout_s=3600)
    failures: list[EngineError] = []
    inbox = Inbox(100)
    model = Model(runner, TOKENIZER, frozenset({TOKENIZER.eos_token_id or 0}), MAX_TOKENS)
    worker = Worker(
        config,
        model,
        inbox,
        lambda call: call(),
        lambda failure: failures.append(failure) if failure else None,
        stats=Stats(),
    )
    row_bytes = runner.vocab_size * 4
    outboxes = [Outbox(2 * row_bytes if plan.reads_every > 1 else 10**9, inbox.wake) for plan in plans]
    events: list[list[TokenEvent | Finish]] = [[] for _ in plans]
    gone: set[int] = set()
    ended_in: dict[int, int] = {}
    turn = 0
    while True:
        for place, plan in enumerate(plans):
            if plan.arrives == turn:
                inbox.submit(Submit(replace(plan.request, request_id=str(place)), outboxes[place], 0.0))
            if plan.leaves is not None and plan.arrives + plan.leaves == turn:
                inbox.send(Cancel(str(place)))
                gone.add(place)
        inbox.wake()
        worker.turn()
        for place, plan in enumerate(plans):
            if outboxes[place]._events and turn % plan.reads_every == 0:
                events[place] += await outboxes[place].take()
                outboxes[place]._release()
                if isinstance(events[place][-1], Finish):
                    ended_in[place] = turn
        turn += 1
        assert turn < 2000, describe(worker)
        ended = {place for place, each in enumerate(events) if each and isinstance(each[-1], Finish)}
        if turn > max(plan.arrives + (plan.leaves or 0) for plan in plans) and ended | gone >= set(
            range(len(plans))
        ):
            break
    assert not failures
    assert inbox.num_waiting == 0
    assert not worker._scheduler.running
    return [None if place in gone else result_of(each, ended_in[place]) for place, each in enumerate(events)]


def describe(worker: Worker) -> str:
    """Say where a schedule that does not end stands."""
    states = [
        f"{each.request.request_id}: {each.num_run} of {len(each.token_ids)}, paused {each.paused_since}"
        for each in worker._scheduler
    ]
    return f"the schedule did not end: {len(worker._scheduler.running)} run of {states}"


def result_of(events: list[TokenEvent | Finish], ended_in: int) -> Result:
    *tokens, finish = events
    assert isinstance(finish, Finish)
    assert all(isinstance(each, TokenEvent) for each in tokens)
    return Result(
        token_ids=tuple(each.token_id for each in tokens),
        texts=tuple(text for each in tokens for text in each.texts),
        reason=finish.reason,
        stop_reason=finish.stop_reason,
        rows=np.stack([each.row for each in tokens]),
        logprobs=tuple(each.logprob for each in tokens),
        num_cached=finish.num_cached,
        ended_in=ended_in,
    )


def check(architecture: str, expected: Result, got: Result) -> None:
    assert got.token_ids == expected.token_ids
    assert (got.texts, got.reason, got.stop_reason) == (
        expected.texts,
        expected.reason,
        expected.stop_reason,
    )
    gap = float(np.abs(got.rows - expected.rows).max())
    assert gap <= TOLERANCE
    largest_gap[architecture] = max(largest_gap.get(architecture, 0.0), gap)
    for one, other in zip(got.logprobs, expected.logprobs, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one == pytest.approx(other, abs=TOLERANCE)


def slot_runner(architecture: str, num_slots: int = 3) -> SlotRunner:
    """Return a runner whose budget holds so many sequences of the longest kind only just."""
    model = tiny_model(architecture)
    bytes_per_token = SlotRunner(model, max_slots=1, max_tokens=16, budget_bytes=10**9)._cache.bytes_per_token
    budget = num_slots * MAX_TOKENS * bytes_per_token
    return SlotRunner(model, max_slots=3, max_tokens=MAX_TOKENS, budget_bytes=budget)


def alone(architecture: str, plan: Plan) -> Result:
    """Return what a request gets alone, on the model's native cache."""
    solo = replace(plan, arrives=0, leaves=None, reads_every=1)
    (result,) = asyncio.run(drive(OneAtATimeRunner(tiny_model(architecture)), [solo], chunk=512))
    assert result is not None
    return result


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    # A failing schedule is short already, and shrinking it would outlast the test's deadline.
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(plans=schedules, num_slots=st.integers(1, 3))
def test_no_schedule_changes_what_a_request_gets(
    architecture: str, plans: list[Plan], num_slots: int
) -> None:
    if architecture in BATCHED:
        runner: Runner = slot_runner(architecture, num_slots)
    else:
        runner = OneAtATimeRunner(tiny_model(architecture))
    results = asyncio.run(drive(runner, plans))
    tried[architecture] += 1
    for plan, got in zip(plans, results, strict=True):
        if got is not None:
            check(architecture, alone(architecture, plan), got)


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_the_parity_probe_picks_the_path(architecture: str) -> None:
    runner, reason = choose_runner(
        tiny_model(architecture), max_slots=2, max_tokens=MAX_TOKENS, budget_bytes=2**30
    )
    assert runner.is_batched == (architecture in BATCHED)
    assert bool(reason) == (architecture in ONE_AT_A_TIME)


def test_a_model_that_looks_elsewhere_fails_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that the masks do not know stands for every architecture that nobody has thought of."""
    masks = runner_module.attention_masks
    monkeypatch.setattr(
        runner_module, "attention_masks", lambda config, positions, *rest: masks(config, positions - 1, *rest)
    )
    runner, reason = choose_runner(tiny_model("llama"), max_slots=2, max_tokens=64, budget_bytes=2**30)
    assert not runner.is_batched
    assert "differ" in reason


def greedy(name: str, prompt: bytes, max_tokens: int = 8, arrives: int = 0) -> Plan:
    request = GenerationRequest(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        max_tokens=max_tokens,
        sampling=SamplingParams(temperature=0),
        ignore_eos=True,
        row_dtype=RowDtype.FLOAT32,
    )
    return Plan(request, arrives, None, 1)


def test_a_growing_history_starts_from_what_was_run_before() -> None:
    runner = slot_runner("llama")
    first = greedy("a", b"You are a helpful assistant. Tell me something.")
    (one,) = asyncio.run(drive(runner, [first]))
    assert one is not None
    history = bytes(first.request.prompt_token_ids) + bytes(each % 256 for each in one.token_ids[:-1])
    second = greedy("b", history + b" And now again.")
    (two,) = asyncio.run(drive(runner, [second]))
    assert two is not None
    assert two.num_cached >= len(first.request.prompt_token_ids)
    check("llama", alone("llama", second), two)


def test_equal_prompts_that_come_at_once_are_run_once() -> None:
    class Counting(SlotRunner):
        num_tokens = 0

        def forward(self, chunks):
            Counting.num_tokens += sum(len(chunk.token_ids) for chunk in chunks)
            return super().forward(chunks)

    prompt = b"The same words for everybody, and quite a few of them."
    runner = Counting(tiny_model("llama"), max_slots=3, max_tokens=MAX_TOKENS, budget_bytes=10**9)
    Counting.num_tokens = 0
    results = asyncio.run(drive(runner, [greedy(str(each), prompt, 4) for each in range(3)]))
    assert [each.num_cached for each in results if each is not None] == [0, len(prompt) - 1, len(prompt) - 1]
    # The prompt once, its last token twice more, and three times three of the completions' four tokens.
    assert Counting.num_tokens == len(prompt) + 2 + 3 * 3


def test_a_long_prompt_holds_up_running_rows_by_one_chunk_at_most() -> None:
    longest: list[int] = []

    class Watching(SlotRunner):
        def forward(self, chunks):
            longest.append(max(len(chunk.token_ids) for chunk in chunks) * len(chunks))
            return super().forward(chunks)

    runner = Watching(tiny_model("llama"), max_slots=3, max_tokens=MAX_TOKENS, budget_bytes=10**9)
    longest.clear()
    plans = [greedy("short", b"ab", 24), greedy("long", bytes(range(100)), 4, arrives=2)]
    asyncio.run(drive(runner, plans, chunk=10))
    assert max(longest) <= 10
    # Between any two chunks of the long prompt the short one has made its step.
    chunks = [place for place, each in enumerate(longest) if each == 10]
    assert len(chunks) == 10
    assert all(later - earlier == 2 for earlier, later in zip(chunks, chunks[1:], strict=False))


def test_a_long_sequence_that_has_ended_keeps_nobody_from_running_side_by_side() -> None:
    runner = slot_runner("llama", num_slots=1)
    short = [greedy(str(place), bytes([65 + place]) * 10, 10) for place in range(3)]
    asyncio.run(drive(runner, short))
    assert len(runner._slots) == 3
    asyncio.run(drive(runner, [greedy("long", bytes(range(110)), 4)]))
    assert runner._cache.capacity > 100
    widths: list[int] = []
    forward = runner.forward
    runner.forward = lambda chunks: widths.append(len(chunks)) or forward(chunks)  # type: ignore[method-assign]
    results = asyncio.run(drive(runner, short))
    assert max(widths) == 3
    for plan, got in zip(short, results, strict=True):
        assert got is not None
        check("llama", alone("llama", plan), got)


def test_a_paused_prefill_is_waited_for_by_nobody() -> None:
    runner = SlotRunner(tiny_model("llama"), max_slots=3, max_tokens=MAX_TOKENS, budget_bytes=10**9)
    prompt = b"The same words for everybody, and quite a few of them, at that."
    stalled = greedy("stalled", prompt, 4)
    stalled = replace(stalled, reads_every=10**6, leaves=60)
    stalled = replace(stalled, request=replace(stalled.request, prompt_row_dtype=RowDtype.FLOAT32))
    other = greedy("other", prompt, 4, arrives=3)
    results = asyncio.run(drive(runner, [stalled, other], chunk=4))
    assert results[1] is not None
    # The other one leaves in turn 60 only; its prompt takes 16 turns, and its tokens 4.
    assert results[1].ended_in < 40
    check("llama", alone("llama", other), results[1])


def test_a_cache_that_is_too_small_for_all_serves_them_one_after_the_other() -> None:
    runner = slot_runner("llama", num_slots=1)
    plans = [greedy(str(place), bytes([65 + place]) * 60, 60) for place in range(3)]
    results = asyncio.run(drive(runner, plans))
    for plan, got in zip(plans, results, strict=True):
        assert got is not None
        check("llama", alone("llama", plan), got)
    assert runner.cache_bytes <= runner._budget_bytes
