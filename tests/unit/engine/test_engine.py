"""The engine as its callers see it, on scripted models that misbehave on demand. Nothing here may hang."""

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import torch

from engine import worker as worker_module
from engine.config import EngineConfig
from engine.engine import Engine, EngineState, Load
from engine.errors import (
    ContextLengthError,
    DeadlineError,
    EngineDeadError,
    EngineError,
    InvalidRequestError,
    LoadError,
    LoadingError,
    LogitsOverflowError,
    NonFiniteLogitsError,
    OutOfMemoryError,
    QueueFullError,
    ShuttingDownError,
    StalledReaderError,
    StepError,
)
from engine.outbox import Outbox
from engine.types import Finish, FinishReason, GenerationRequest, RowDtype, SamplingParams, TokenEvent
from tests.fakes import VOCAB_SIZE, hooked_load

GREEDY = SamplingParams(temperature=0)

pytestmark = pytest.mark.timeout(20)


def request(request_id: str = "a", **fields: Any) -> GenerationRequest:
    values = {"prompt_token_ids": (1, 2, 3), "max_tokens": 100, "sampling": GREEDY, **fields}
    return GenerationRequest(request_id=request_id, **values)


@asynccontextmanager
async def running(load: Load | None = None, **config: Any) -> AsyncIterator[Engine]:
    engine = Engine(EngineConfig(model_name="hooked", **config), load or hooked_load())
    engine.start()
    await engine.wait_ready()
    yield engine
    await engine.stop()


async def collect(outbox: Outbox) -> tuple[list[TokenEvent], Finish]:
    tokens: list[TokenEvent] = []
    while True:
        for event in await outbox.take():
            if isinstance(event, Finish):
                return tokens, event
            tokens.append(event)


async def generate(engine: Engine, **fields: Any) -> tuple[list[TokenEvent], Finish]:
    asked = request(**fields)
    try:
        return await collect(engine.submit(asked))
    finally:
        engine.cancel(asked.request_id)


def text_of(tokens: list[TokenEvent]) -> str:
    return "".join(token.text for token in tokens)


async def test_a_script_is_said_and_ends_with_its_end_token() -> None:
    async with running() as engine:
        tokens, finish = await generate(engine)
    assert text_of(tokens) == "abcdefgh"
    assert len(tokens) == 9
    assert (finish.reason, finish.stop_reason) == (FinishReason.STOP, None)


@pytest.mark.parametrize("max_tokens", [1, 3, 5])
async def test_max_tokens_is_exact(max_tokens: int) -> None:
    async with running() as engine:
        tokens, finish = await generate(engine, max_tokens=max_tokens)
    assert len(tokens) == max_tokens
    assert finish.reason is FinishReason.LENGTH


async def test_no_tokens_asked_for_are_no_tokens() -> None:
    async with running() as engine:
        tokens, finish = await generate(engine, max_tokens=0)
        assert tokens == []
        assert finish.reason is FinishReason.LENGTH
        assert engine.num_waiting == 0


async def test_without_max_tokens_the_context_is_the_limit() -> None:
    async with running(hooked_load(max_model_len=8)) as engine:
        tokens, finish = await generate(engine, max_tokens=None)
    assert len(tokens) == 5
    assert finish.reason is FinishReason.LENGTH


async def test_ignore_eos_goes_on_behind_the_end_token() -> None:
    async with running() as engine:
        tokens, _ = await generate(engine, max_tokens=12, ignore_eos=True)
    assert len(tokens) == 12


async def test_a_special_token_as_stop_string_stops_by_its_id() -> None:
    async with running() as engine:
        tokens, finish = await generate(engine, stop=("<|im_end|>",), ignore_eos=True)
    assert text_of(tokens) == "abcdefgh"
    assert finish.stop_reason == "<|im_end|>"


async def test_nothing_is_computed_that_nobody_asked_for() -> None:
    async with running() as engine:
        tokens, _ = await generate(engine)
    assert all(each.row is None and each.logprob is None and each.top_logprobs is None for each in tokens)


@pytest.mark.parametrize("dtype", list(RowDtype))
async def test_rows_are_raw_whatever_the_sampling(dtype: RowDtype) -> None:
    seen: dict[int, np.ndarray] = {}

    def keep(place: int, row: torch.Tensor) -> None:
        seen[place] = row.numpy().copy()

    wild = SamplingParams(temperature=0.7, top_p=0.5, top_k=3, min_p=0.1, repetition_penalty=1.5)
    async with running(hooked_load(keep)) as engine:
        tokens, _ = await generate(engine, sampling=wild, seed=1, row_dtype=dtype, logprobs=True)
    assert len(tokens) > 3
    for place, token in enumerate(tokens):
        assert token.row is not None
        assert token.row.dtype == dtype.value
        assert not token.row.flags.writeable
        np.testing.assert_array_equal(token.row, seen[place].astype(dtype.value))
        exact = seen[place].astype(np.float64)
        exact -= exact.max() + np.log(np.exp(exact - exact.max()).sum())
        assert token.logprob == pytest.approx(exact[token.token_id], abs=1e-5)


async def test_bfloat16_logits_are_exact_in_float16_rows() -> None:
    async with running(hooked_load(dtype=torch.bfloat16)) as engine:
        wide, _ = await generate(engine, row_dtype=RowDtype.FLOAT32)
        narrow, _ = await generate(engine, row_dtype=RowDtype.FLOAT16)
    for one, other in zip(wide, narrow, strict=True):
        assert one.row is not None
        assert other.row is not None
        np.testing.assert_array_equal(one.row, other.row.astype(np.float32))


async def test_a_seed_gives_the_same_tokens_alone_and_in_company() -> None:
    hot = SamplingParams(temperature=100.0)
    async with running() as engine:
        alone, _ = await generate(engine, sampling=hot, seed=7, max_tokens=20, ignore_eos=True)
        outboxes = [
            engine.submit(request(str(seed), sampling=hot, seed=seed, max_tokens=20, ignore_eos=True))
            for seed in (-(2**63), 7, 2**63 - 1)
        ]
        together = [await collect(outbox) for outbox in outboxes]
    ids = [[each.token_id for each in tokens] for tokens, _ in together]
    assert ids[1] == [each.token_id for each in alone]
    assert ids[0] != ids[1] != ids[2]


async def test_companions_with_other_settings_change_nothing() -> None:
    settings = [
        {"sampling": SamplingParams(temperature=5.0, top_k=7), "seed": 3},
        {"sampling": SamplingParams(temperature=0, repetition_penalty=3.0)},
        {"sampling": GREEDY, "stop": ("cd",), "logprobs": True, "num_top_logprobs": 2},
        {"sampling": GREEDY, "max_tokens": 2, "row_dtype": RowDtype.FLOAT16},
    ]
    async with running() as engine:
        alone = [await generate(engine, **each) for each in settings]
        outboxes = [engine.submit(request(str(place), **each)) for place, each in enumerate(settings)]
        together = [await collect(outbox) for outbox in outboxes]
    for (tokens, finish), (others, other) in zip(alone, together, strict=True):
        assert [each.token_id for each in tokens] == [each.token_id for each in others]
        assert [each.logprob for each in tokens] == [each.logprob for each in others]
        assert (finish.reason, finish.stop_reason) == (other.reason, other.stop_reason)
    assert max(finish.timings.max_batch_size for _, finish in together) > 1


# Refusals.


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"prompt_token_ids": ()}, InvalidRequestError),
        ({"prompt_token_ids": (VOCAB_SIZE,)}, InvalidRequestError),
        ({"prompt_token_ids": (-1,)}, InvalidRequestError),
        ({"stop_token_ids": frozenset({70000})}, InvalidRequestError),
        ({"max_tokens": 10**12}, ContextLengthError),
        ({"prompt_token_ids": (1,) * 4096, "max_tokens": None}, ContextLengthError),
    ],
)
async def test_what_can_never_work_is_refused_at_once(fields: Any, error: type[EngineError]) -> None:
    async with running() as engine:
        with pytest.raises(error):
            engine.submit(request(**fields))
        assert (await generate(engine))[1].reason is FinishReason.STOP


class Gate:
    """Holds the worker thread in a forward pass until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self, place: int, row: torch.Tensor) -> None:
        self.reached.set()
        assert self.opened.wait(15)

    async def held(self) -> None:
        assert await asyncio.to_thread(self.reached.wait, 15)


async def test_a_full_queue_refuses_at_once_and_the_waiting_go_on() -> None:
    gate = Gate()
    async with running(hooked_load(gate), max_queue=2, max_batch_size=1) as engine:
        first = engine.submit(request("first"))
        await gate.held()
        others = [engine.submit(request(name)) for name in ("second", "third")]
        with pytest.raises(QueueFullError):
            engine.submit(request("fourth"))
        gate.opened.set()
        for outbox in (first, *others):
            assert text_of((await collect(outbox))[0]) == "abcdefgh"
        assert engine.num_waiting == 0


async def test_requests_wait_while_the_model_loads() -> None:
    opened = threading.Event()

    def slow_load(config: EngineConfig) -> Any:
        assert opened.wait(15)
        return hooked_load()(config)

    engine = Engine(EngineConfig(), slow_load)
    engine.start()
    with pytest.raises(LoadingError):
        engine.submit(request())
    with pytest.raises(LoadingError):
        _ = engine.info
    opened.set()
    await engine.wait_ready()
    assert text_of((await generate(engine))[0]) == "abcdefgh"
    await engine.stop()


async def test_a_model_that_cannot_be_loaded_says_why() -> None:
    def broken_load(config: EngineConfig) -> Any:
        raise LoadError("no such checkpoint")

    engine = Engine(EngineConfig(), broken_load)
    engine.start()
    with pytest.raises(LoadError, match="no such checkpoint"):
        await engine.wait_ready()
    with pytest.raises(EngineDeadError):
        engine.submit(request())
    await engine.stop()


# Leaving early.


async def test_a_cancelled_request_is_gone_at_the_next_step() -> None:
    gate = Gate()
    places: list[int] = []

    def hook(place: int, row: torch.Tensor) -> None:
        places.append(place)
        if place == 2:
            gate(place, row)

    async with running(hooked_load(hook)) as engine:
        engine.submit(request("gone", ignore_eos=True, max_tokens=4000))
        await gate.held()
        engine.cancel("gone")
        gate.opened.set()
        assert text_of((await generate(engine, request_id="next"))[0]) == "abcdefgh"
    # Places 0 to 2 of the first request, at most one step more, and the nine of the second.
    assert len(places) <= 3 + 1 + 9


async def test_a_request_cancelled_while_it_waits_never_runs() -> None:
    gate = Gate()
    async with running(hooked_load(gate), max_batch_size=1) as engine:
        first = engine.submit(request("first"))
        await gate.held()
        engine.submit(request("second"))
        engine.cancel("second")
        gate.opened.set()
        await collect(first)
        engine.cancel("first")
        await generate(engine, request_id="third")
        assert engine.num_waiting == 0
        assert engine.num_requests == 0


async def test_a_full_outbox_pauses_its_own_sequence_only() -> None:
    row_bytes = VOCAB_SIZE * 2
    async with running(outbox_bytes=3 * row_bytes) as engine:
        slow = engine.submit(request("slow", row_dtype=RowDtype.FLOAT16, ignore_eos=True, max_tokens=50))
        for _ in range(3):
            assert text_of((await generate(engine, request_id="quick"))[0]) == "abcdefgh"
        waiting = await slow.take()
        assert len(waiting) == 3
        tokens, _ = await collect(slow)
        assert len(waiting) + len(tokens) == 50


async def test_a_reader_that_takes_nothing_is_given_up() -> None:
    async with running(outbox_bytes=1, stall_timeout_s=0.05) as engine:
        outbox = engine.submit(request("stalled", row_dtype=RowDtype.FLOAT16))
        await outbox.failed.wait()
        assert len(await outbox.take()) == 1
        with pytest.raises(StalledReaderError):
            await outbox.take()
        assert text_of((await generate(engine, request_id="next"))[0]) == "abcdefgh"


# Faults.


async def outcome(outbox: Outbox) -> str | EngineError:
    try:
        return text_of((await collect(outbox))[0])
    except EngineError as error:
        return error


def faulty(
    at: int, fault: Callable[[torch.Tensor], None], times: int = 1
) -> Callable[[int, torch.Tensor], None]:
    """Misbehave at a place of the script, the first few times that it is reached."""
    left = times

    def hook(place: int, row: torch.Tensor) -> None:
        nonlocal left
        if place == at and left:
            left -= 1
            fault(row)

    return hook


def raising(error: Exception) -> Callable[[torch.Tensor], None]:
    def fault(row: torch.Tensor) -> None:
        raise error

    return fault


def filling(value: float) -> Callable[[torch.Tensor], None]:
    def fault(row: torch.Tensor) -> None:
        row[9] = value

    return fault


@pytest.mark.parametrize("at", [0, 4])
@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (raising(RuntimeError("boom")), StepError),
        (raising(torch.OutOfMemoryError("no memory")), OutOfMemoryError),
        (raising(MemoryError()), OutOfMemoryError),
        (filling(math.nan), NonFiniteLogitsError),
        (filling(math.inf), NonFiniteLogitsError),
        (filling(70000.0), LogitsOverflowError),
    ],
)
async def test_a_fault_fails_its_own_sequence_and_the_next_request_works(
    at: int, fault: Callable[[torch.Tensor], None], error: type[EngineError]
) -> None:
    # An exception in a pass of three rows has each tried alone, so that one must raise twice to fail.
    times = 2 if at and error is StepError else 1
    async with running(hooked_load(faulty(at, fault, times))) as engine:
        outboxes = [
            engine.submit(request(name, row_dtype=RowDtype.FLOAT16)) for name in ("one", "two", "three")
        ]
        outcomes = [await outcome(outbox) for outbox in outboxes]
        assert [type(each) for each in outcomes].count(error) == 1
        assert outcomes.count("abcdefgh") == 2
        assert text_of((await generate(engine, request_id="next"))[0]) == "abcdefgh"
        assert engine.last_failure is None


async def test_a_fault_in_sampling_fails_its_group_only(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = worker_module.sample

    def faulty_sample(logits: torch.Tensor, params: SamplingParams, rows: Any, **others: Any) -> list[int]:
        if params.top_k == 7:
            raise RuntimeError("boom")
        return sample(logits, params, rows, **others)

    monkeypatch.setattr(worker_module, "sample", faulty_sample)
    async with running() as engine:
        names = ("good", "bad", "bad too")
        sampling = (GREEDY, SamplingParams(top_k=7), SamplingParams(top_k=7))
        outboxes = [
            engine.submit(request(*each[:1], sampling=each[1])) for each in zip(names, sampling, strict=True)
        ]
        outcomes = [await outcome(outbox) for outbox in outboxes]
        assert outcomes[0] == "abcdefgh"
        assert [type(each) for each in outcomes[1:]] == [StepError] * 2
        assert text_of((await generate(engine, request_id="next"))[0]) == "abcdefgh"


@pytest.mark.parametrize("error", [RuntimeError("boom"), torch.OutOfMemoryError("no memory")])
async def test_a_fault_in_taking_rows_fails_loudly_and_once(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    extracts, left = worker_module.Extracts, 1

    def faulty_extracts(*arguments: Any) -> Any:
        nonlocal left
        if left:
            left -= 1
            raise error
        return extracts(*arguments)

    monkeypatch.setattr(worker_module, "Extracts", faulty_extracts)
    async with running() as engine:
        failure = await outcome(engine.submit(request("a", row_dtype=RowDtype.FLOAT16)))
        assert isinstance(failure, StepError | OutOfMemoryError)
        assert text_of((await generate(engine, request_id="next"))[0]) == "abcdefgh"


async def test_a_reader_that_has_gone_without_a_word_harms_nobody() -> None:
    async with running() as engine:
        gone = engine.submit(request("gone", ignore_eos=True, max_tokens=500))

        def broken(events: list[Any]) -> None:
            raise RuntimeError("the reader's side is broken")

        gone.deliver = broken  # type: ignore[method-assign]
        assert text_of((await generate(engine, request_id="next"))[0]) == "abcdefgh"
        failure = await outcome(gone)
        assert isinstance(failure, EngineError)


async def test_a_request_past_its_deadline_fails_and_frees_its_place() -> None:
    async with running(deadline_s=0.2, max_batch_size=1) as engine:
        outbox = engine.submit(request("late", ignore_eos=True, max_tokens=4000, row_dtype=RowDtype.FLOAT16))
        # It fills its outbox' worth of tokens for as long as it may; nobody reads, and time goes by.
        await outbox.failed.wait()
        while True:
            try:
                await outbox.take()
            except DeadlineError:
                break
        assert text_of((await generate(engine, request_id="next"))[0]) == "abcdefgh"


async def test_rows_in_flight_of_all_requests_are_bounded() -> None:
    gate = Gate()
    async with running(hooked_load(gate), row_budget_bytes=100) as engine:
        first = engine.submit(request("first", held_bytes=80))
        await gate.held()
        second = engine.submit(request("second", held_bytes=80))
        third = engine.submit(request("third", held_bytes=10))
        gate.opened.set()
        assert text_of((await collect(first))[0]) == "abcdefgh"
        # The first has ended, but its rows are still held; who came later does not overtake.
        assert engine.num_waiting == 2
        engine.cancel("first")
        assert text_of((await collect(second))[0]) == "abcdefgh"
        assert text_of((await collect(third))[0]) == "abcdefgh"


async def test_a_step_that_failed_is_remembered_until_one_succeeds() -> None:
    async with running(hooked_load(faulty(0, raising(RuntimeError("boom"))))) as engine:
        assert isinstance(await outcome(engine.submit(request())), StepError)
        assert isinstance(engine.last_failure, StepError)
        await generate(engine, request_id="next")
        assert engine.last_failure is None


async def test_a_worker_that_dies_fails_every_request_and_takes_no_more() -> None:
    gate = Gate()

    class Killed(BaseException):
        """Not an Exception, so no step may survive it."""

    def hook(place: int, row: torch.Tensor) -> None:
        gate(place, row)
        raise Killed

    async with running(hooked_load(hook), max_batch_size=1) as engine:
        outboxes = [engine.submit(request(name)) for name in ("running", "waiting")]
        await gate.held()
        outboxes.append(engine.submit(request("on its way")))
        gate.opened.set()
        assert [type(await outcome(outbox)) for outbox in outboxes] == [EngineDeadError] * 3
        while engine.state is not EngineState.DEAD:
            await asyncio.sleep(0)
        with pytest.raises(EngineDeadError):
            engine.submit(request("late"))


async def test_a_stopping_engine_fails_what_is_left() -> None:
    gate = Gate()
    async with running(hooked_load(gate), max_batch_size=1) as engine:
        outboxes = [engine.submit(request(name)) for name in ("running", "waiting")]
        await gate.held()
        await engine.drain(0.01)
        with pytest.raises(ShuttingDownError):
            engine.submit(request("late"))
        stopping = asyncio.ensure_future(engine.stop())
        await asyncio.sleep(0)  # it has told the worker to stop, and waits for it
        gate.opened.set()
        await stopping
        assert [type(await outcome(outbox)) for outbox in outboxes] == [ShuttingDownError] * 2


async def test_a_drain_lets_running_requests_end() -> None:
    gate = Gate()
    async with running(hooked_load(gate)) as engine:
        reading: Awaitable[Any] = asyncio.ensure_future(generate(engine))
        await gate.held()
        draining = asyncio.ensure_future(engine.drain(15))
        gate.opened.set()
        await draining
        assert text_of((await reading)[0]) == "abcdefgh"


async def test_a_request_that_cannot_be_begun_fails_alone_and_frees_its_place() -> None:
    def load(config: EngineConfig) -> Any:
        model, info = hooked_load()(config)
        detokenizer = model.tokenizer.detokenizer
        calls = iter([True, False])

        def failing_once(**named: Any) -> Any:
            if next(calls):
                raise ValueError("broken")
            return detokenizer(**named)

        model.tokenizer.detokenizer = failing_once  # type: ignore[method-assign]
        return model, info

    async with running(load, max_queue=1) as engine:
        with pytest.raises(StepError, match="ValueError"):
            await generate(engine)
        tokens, _ = await generate(engine, request_id="b")
        assert tokens
        assert engine.num_waiting == 0


async def test_a_worker_that_dies_over_a_request_leaves_nobody_waiting() -> None:
    class Killed(BaseException):
        pass

    def load(config: EngineConfig) -> Any:
        model, info = hooked_load()(config)

        def killing(**named: Any) -> Any:
            raise Killed

        model.tokenizer.detokenizer = killing  # type: ignore[method-assign]
        return model, info

    async with running(load) as engine:
        outboxes = [engine.submit(request(str(place))) for place in range(3)]
        for outbox in outboxes:
            with pytest.raises(EngineDeadError):
                await collect(outbox)
