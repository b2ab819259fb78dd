"""Rows of given tokens, and divergences of two contexts, against plain forward passes."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from scipy.special import log_softmax, rel_entr, softmax
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine import runner as runner_module
from engine import scoring
from engine.config import EngineConfig
from engine.errors import EngineError, OutOfMemoryError
from engine.fake import byte_tokenizer
from engine.inbox import Cancel, Inbox, Submit
from engine.loading import embedded_checkpoint
from engine.outbox import Outbox
from engine.runner import OneAtATimeRunner, Runner, SlotRunner
from engine.stats import Stats
from engine.types import Contrast, Finish, GenerationRequest, RowDtype, SamplingParams, TokenEvent
from engine.worker import Model, Worker
from tests.model.tiny import ARCHITECTURES, BATCHED, VOCAB_SIZE, tiny_model

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

TOLERANCE = 1e-3
TOKENIZER = byte_tokenizer()
MAX_LEN = 256


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner_module, "BLOCK_TOKENS", 16)
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)


def scored(prompt: bytes, **fields: Any) -> GenerationRequest:
    values = {"max_tokens": 0, "prompt_row_dtype": RowDtype.FLOAT32, **fields}
    return GenerationRequest(request_id="?", prompt_token_ids=tuple(prompt), **values)


def compared(p: bytes, q: bytes, tokens: bytes, temperature: float = 1.0) -> GenerationRequest:
    contrast = Contrast(token_ids=tuple(q + tokens), start=len(q), temperature=temperature)
    return scored(p + tokens, prompt_row_dtype=None, prompt_start=len(p), contrast=contrast)


def spoken(prompt: bytes, max_tokens: int) -> GenerationRequest:
    return GenerationRequest(
        request_id="?",
        prompt_token_ids=tuple(prompt),
        max_tokens=max_tokens,
        sampling=SamplingParams(temperature=0),
        ignore_eos=True,
        row_dtype=RowDtype.FLOAT32,
    )


Events = list[TokenEvent | Finish]


async def drive(
    runner: Runner,
    requests: list[GenerationRequest],
    *,
    chunk: int = 16,
    max_batch_size: int = 4,
    outbox_rows: int = 10**6,
    leaves: dict[int, int] | None = None,
) -> tuple[list[Events], list[EngineError]]:
    """Run requests turn by turn; one of ``leaves`` is cancelled in that turn."""
    row_bytes = runner.vocab_size * 4
    config = EngineConfig(
        max_batch_size=max_batch_size, prefill_chunk=chunk, outbox_bytes=outbox_rows * row_bytes
    )
    failures: list[EngineError] = []
    inbox = Inbox(100)
    model = Model(runner, TOKENIZER, frozenset({TOKENIZER.eos_token_id or 0}), MAX_LEN)
    worker = Worker(
        config,
        model,
        inbox,
        lambda call: call(),
        lambda each: failures.append(each) if each else None,
        stats=Stats(),
    )
    outboxes = [Outbox(config.outbox_bytes, inbox.wake) for _ in requests]
    events: list[Events] = [[] for _ in requests]
    for place, request in enumerate(requests):
        inbox.submit(Submit(replace(request, request_id=str(place)), outboxes[place], 0.0))
    for turn in range(3000):
        for place in [each for each, when in (leaves or {}).items() if when == turn]:
            inbox.send(Cancel(str(place)))
        inbox.wake()
        worker.turn()
        for place, outbox in enumerate(outboxes):
            if outbox._events:
                events[place] += await outbox.take()
                outbox._release()
        if not list(worker._scheduler):
            break
    assert not list(worker._scheduler)
    assert inbox.num_waiting == 0
    return events, failures


def run(runner: Runner, requests: list[GenerationRequest], **options: Any) -> list[Events]:
    events, failures = asyncio.run(drive(runner, requests, **options))
    assert not failures
    return events


def runner_of(architecture: str, *, num_slots: int = 4, budget: int = 10**9) -> Runner:
    model = tiny_model(architecture)
    if architecture not in BATCHED:
        return OneAtATimeRunner(model)
    return SlotRunner(model, max_slots=num_slots, max_tokens=MAX_LEN, budget_bytes=budget)


def plain(model: PreTrainedModel, token_ids: tuple[int, ...]) -> np.ndarray:
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].float().numpy()


def check_rows(model: PreTrainedModel, request: GenerationRequest, events: Events) -> None:
    *tokens, finish = events
    assert isinstance(finish, Finish)
    start, ids = request.prompt_start, request.prompt_token_ids
    rows = plain(model, ids)[start - 1 :]
    rows = rows if request.next_row else rows[:-1]
    assert [each.token_id for each in tokens] == [*ids[start:], *[-1] * request.next_row]
    for place, (event, row) in enumerate(zip(tokens, rows, strict=True)):
        assert event.is_prompt
        if request.prompt_row_dtype is not None:
            np.testing.assert_allclose(event.row, row, atol=TOLERANCE)
        expected = 0.0 if event.token_id == -1 else log_softmax(row.astype(np.float64))[event.token_id]
        assert event.logprob == pytest.approx(expected, abs=TOLERANCE)
        if request.prompt_columns:
            np.testing.assert_allclose(
                event.selected, row[list(request.prompt_columns[place])], atol=TOLERANCE
            )
        if request.token_stats:
            assert event.stats is not None
            rank = 0 if event.token_id == -1 else int((row > row[event.token_id]).sum()) + 1
            assert abs(event.stats.rank - rank) <= 1


def check_divergence(
    model: PreTrainedModel, request: GenerationRequest, events: Events, tolerance: float = 1e-5
) -> None:
    *tokens, finish = events
    assert isinstance(finish, Finish)
    contrast = request.contrast
    assert contrast is not None
    p_rows = plain(model, request.prompt_token_ids)[request.prompt_start - 1 : -1]
    q_rows = plain(model, contrast.token_ids)[contrast.start - 1 : -1]
    assert [each.token_id for each in tokens] == list(request.prompt_token_ids[request.prompt_start :])
    for event, x, y in zip(tokens, p_rows, q_rows, strict=True):
        assert event.row is event.logprob is None
        p, q = (softmax(row.astype(np.float64) / contrast.temperature) for row in (x, y))
        middle = (p + q) / 2
        got = event.divergence
        assert got is not None
        assert got.jsd == pytest.approx(
            (rel_entr(p, middle).sum() + rel_entr(q, middle).sum()) / 2, abs=tolerance
        )
        assert got.kl_pq == pytest.approx(rel_entr(p, q).sum(), abs=tolerance, rel=tolerance)
        assert got.kl_qp == pytest.approx(rel_entr(q, p).sum(), abs=tolerance, rel=tolerance)
        assert got.tvd == pytest.approx(np.abs(p - q).sum() / 2, abs=tolerance)
        assert got.logprob_p == pytest.approx(
            log_softmax(x.astype(np.float64))[event.token_id], abs=tolerance
        )


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_rows_and_divergences_are_those_of_plain_forward_passes(architecture: str) -> None:
    model = tiny_model(architecture)
    requests = [
        scored(b"All rows of this text are wanted, in several chunks."),
        scored(b"A long context of which nobody wants a row, and then: the end.", prompt_start=56),
        scored(b"short", next_row=True, token_stats=True),
        scored(b"x", next_row=True),
        scored(
            b"ragged",
            prompt_start=4,
            prompt_row_dtype=None,
            prompt_logprobs=True,
            prompt_columns=((5,), (1, 2, 9)),
        ),
        scored(b"nothing", prompt_start=7),
    ]
    pairs = [
        compared(
            b"One context", b"Another context, and quite a bit longer than that", b" of the same words."
        ),
        compared(b"a" * 40, b"b" * 3, b"cold and warm", temperature=1.7),
    ]
    events = run(runner_of(architecture), requests + pairs)
    for request, got in zip(requests, events, strict=False):
        check_rows(model, request, got)
    for request, got in zip(pairs, events[len(requests) :], strict=True):
        # Tiny models with large weights: rows in slots differ from plain ones by up to 1e-4.
        check_divergence(model, request, got, 5e-4)


texts = st.builds(
    lambda stem, length, tail: (b"Once upon a time in a land far away, " * 2)[stem : stem + length] + tail,
    st.integers(0, 1),
    st.integers(1, 40),
    st.binary(min_size=1, max_size=30),
)


@st.composite
def scorings(draw: st.DrawFn) -> GenerationRequest:
    text = draw(texts)
    if draw(st.integers(0, 3)) == 0:
        tokens = draw(st.binary(min_size=1, max_size=30))
        return compared(text, draw(texts), tokens, draw(st.sampled_from([1.0, 0.7])))
    return scored(text, prompt_start=draw(st.integers(1, len(text))), next_row=draw(st.booleans()))


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt2", "deepseek_v3", "qwen3_next"])
@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    asked=st.lists(scorings(), min_size=1, max_size=5),
    companions=st.lists(st.tuples(texts, st.integers(1, 20)), max_size=3),
    outbox_rows=st.sampled_from([2, 10**6]),
    leaves=st.dictionaries(st.integers(0, 1), st.integers(0, 12), max_size=1),
    num_slots=st.integers(2, 4),
)
def test_companions_change_no_row_and_no_token(  # noqa: PLR0917 - hypothesis draws them
    architecture: str,
    asked: list[GenerationRequest],
    companions: list[tuple[bytes, int]],
    outbox_rows: int,
    leaves: dict[int, int],
    num_slots: int,
) -> None:
    model = tiny_model(architecture)
    talk = [spoken(*each) for each in companions]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "MAX_ROW_BYTES", 9 * 4 * VOCAB_SIZE)
        bytes_per_token = 0
        if architecture in BATCHED:
            probe = SlotRunner(model, max_slots=1, max_tokens=16, budget_bytes=10**9)
            bytes_per_token = probe._cache.bytes_per_token
        runner = runner_of(architecture, num_slots=4, budget=bytes_per_token * num_slots * 128 or 10**9)
        if isinstance(runner, SlotRunner):
            runner.max_tokens = 128
        events = run(runner, asked + talk, outbox_rows=outbox_rows, leaves=leaves)
    for place, (request, got) in enumerate(zip(asked + talk, events, strict=True)):
        if place in leaves:
            continue
        if request.contrast is not None:
            check_divergence(model, request, got, 5e-4)
        elif request.max_tokens == 0:
            check_rows(model, request, got)
        else:
            ids = [each.token_id for each in got if isinstance(each, TokenEvent)]
            assert len(ids) == request.max_tokens
            rows = plain(model, (*request.prompt_token_ids, *ids))[len(request.prompt_token_ids) - 1 : -1]
            np.testing.assert_allclose(np.stack([each.row for each in got[:-1]]), rows, atol=TOLERANCE)


class Watching(SlotRunner):
    """Keeps what each pass ran: tokens with padding, rows kept, and how many sequences."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.passes: list[tuple[int, int, int]] = []
        super().__init__(*args, **kwargs)
        self.passes.clear()

    def _run(self, chunks: Any, *, keep: int) -> Any:
        num_tokens = max(len(chunk.token_ids) for chunk in chunks) * len(chunks)
        self.passes.append((num_tokens, keep * len(chunks), len(chunks)))
        return super()._run(chunks, keep=keep)


def watching() -> Watching:
    return Watching(tiny_model("llama"), max_slots=8, max_tokens=MAX_LEN, budget_bytes=10**9)


def test_short_ones_share_a_pass() -> None:
    runner = watching()
    run(runner, [scored(bytes([65 + each]) * 9) for each in range(8)], chunk=64, max_batch_size=8)
    assert runner.passes == [(64, 64, 8)]


def test_only_wanted_rows_go_through_the_head() -> None:
    runner = watching()
    run(runner, [scored(b"c" * 100 + b"wanted", prompt_start=100)], chunk=32)
    assert sum(keep for _, keep, _ in runner.passes if keep > 1) == 6
    assert all(num <= 32 for num, _, _ in runner.passes)


def test_a_known_context_is_not_run_again() -> None:
    runner = watching()
    run(runner, [scored(b"context " * 8 + b"one", prompt_start=64)], chunk=128)
    runner.passes.clear()
    ((*_, finish),) = run(runner, [scored(b"context " * 8 + b"two", prompt_start=64)], chunk=128)
    assert isinstance(finish, Finish)
    assert finish.num_cached == 63
    assert runner.passes == [(3, 3, 1)]


def test_running_rows_wait_for_one_chunk_of_rows_at_most() -> None:
    runner = watching()
    talk = spoken(b"ab", 40)
    run(runner, [talk, scored(bytes(range(150))), spoken(bytes(range(100, 200)), 2)], chunk=10)
    assert max(num for num, _, _ in runner.passes) <= 10
    sizes = [num for num, _, _ in runner.passes]
    # Between any two chunks of prompts the first one has made its step, as long as it runs.
    decodes = [place for place, num in enumerate(sizes) if num <= 2][1:40]
    assert all(later - earlier <= 2 for earlier, later in zip(decodes, decodes[1:], strict=False))


def test_rows_of_a_long_text_never_fill_more_than_half_an_outbox_at_once() -> None:
    runner = watching()
    run(runner, [scored(bytes(200 * [7]))], chunk=128, outbox_rows=8)
    assert max(keep for _, keep, _ in runner.passes) == 4


def test_a_short_text_does_not_wait_for_the_whole_of_a_long_one() -> None:
    runner = watching()
    events: list[int] = []

    class Noting(Outbox):
        def deliver(self, delivered: Any) -> None:
            events.append(len(delivered))
            super().deliver(delivered)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{__name__}.Outbox", Noting)
        run(runner, [scored(bytes(200 * [7])), scored(b"four")], chunk=10)
    # The long one's first chunk, the short one with its end, and then the others.
    assert events[:3] == [10, 4, 10]


def test_two_contexts_run_side_by_side() -> None:
    runner = watching()
    run(runner, [compared(b"p" * 5, b"q" * 9, b"the same tokens for both")], chunk=256)
    assert runner.passes == [(2 * 32, 2 * 24, 2)]


def test_two_contexts_that_the_cache_cannot_hold_fail_with_a_remedy_and_others_go_on() -> None:
    model = tiny_model("llama")
    per_token = SlotRunner(model, max_slots=1, max_tokens=16, budget_bytes=10**9)._cache.bytes_per_token
    runner = SlotRunner(model, max_slots=2, max_tokens=128, budget_bytes=128 * per_token)
    pair = compared(b"p" * 80, b"q" * 80, b"r" * 30)
    other = scored(b"another one")
    events, failures = asyncio.run(drive(runner, [pair, other]))
    assert [type(each) for each in failures] == [OutOfMemoryError]
    assert "KV_CACHE_BYTES" in str(failures[0])
    check_rows(model, other, events[1])


def test_a_faulty_row_of_a_prompt_fails_its_own_request() -> None:
    class Faulty(SlotRunner):
        def forward_rows(self, chunks: Any, keep: Any) -> Any:
            rows = [each.clone() for each in super().forward_rows(chunks, keep)]
            for chunk, each in zip(chunks, rows, strict=True):
                if 200 in chunk.token_ids:
                    each[0, 5] = torch.nan
            return rows

    model = tiny_model("llama")
    runner = Faulty(model, max_slots=4, max_tokens=MAX_LEN, budget_bytes=10**9)
    requests = [
        scored(b"good one"),
        scored(b"bad \xc8 one"),
        compared(b"bad p\xc8", b"q", b"rest"),
        scored(b"good two"),
    ]
    events, failures = asyncio.run(drive(runner, requests, chunk=64))
    assert len(failures) == 2
    for place in (0, 3):
        check_rows(model, requests[place], events[place])
    assert events[1] == events[2] == []


@pytest.mark.parametrize("error", [RuntimeError("boom"), torch.OutOfMemoryError("no memory")])
def test_an_exception_in_a_shared_pass_fails_one_request(error: Exception) -> None:
    class Faulty(SlotRunner):
        def forward_rows(self, chunks: Any, keep: Any) -> Any:
            if any(200 in chunk.token_ids for chunk in chunks):
                raise error
            return super().forward_rows(chunks, keep)

    model = tiny_model("llama")
    runner = Faulty(model, max_slots=4, max_tokens=MAX_LEN, budget_bytes=10**9)
    requests = [scored(b"good one"), scored(b"good two"), scored(b"bad \xc8 one")]
    events, failures = asyncio.run(drive(runner, requests, chunk=64))
    assert len(failures) == 1
    for place in (0, 1):
        check_rows(model, requests[place], events[place])


def test_the_real_model_agrees_with_a_forward_pass_in_this_process() -> None:
    model = AutoModelForCausalLM.from_pretrained(embedded_checkpoint(EngineConfig.cache_dir)).eval()
    runner = SlotRunner(model, max_slots=4, max_tokens=MAX_LEN, budget_bytes=10**9)
    text, p, q = (
        tuple(range(1000, 1150)),
        tuple(range(2000, 2040)),
        tuple(range(300, 400, 3)),
    )
    rows = GenerationRequest(
        request_id="?", prompt_token_ids=text, max_tokens=0, prompt_row_dtype=RowDtype.FLOAT32
    )
    contrast = Contrast(token_ids=q + text, start=len(q))
    pair = replace(
        rows, prompt_token_ids=p + text, prompt_start=len(p), prompt_row_dtype=None, contrast=contrast
    )
    one, other = run(runner, [rows, pair], chunk=512)
    check_rows(model, rows, one)
    expected = log_softmax(plain(model, text)[:-1].astype(np.float64), axis=-1)
    chain = sum(float(expected[place, token_id]) for place, token_id in enumerate(text[1:]))
    got = sum(each.logprob for each in one if isinstance(each, TokenEvent) and each.logprob is not None)
    assert got == pytest.approx(chain, abs=1e-2)
    check_divergence(model, pair, other)
