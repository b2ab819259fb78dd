"""The real model in mixed company: what each request gets is what it gets alone."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.config import EngineConfig
from engine.engine import Engine
from engine.loading import embedded_checkpoint, model_of
from engine.packing import pack_linears
from engine.tokenizer import Tokenizer
from engine.types import Finish, GenerationRequest, ModelInfo, RowDtype, SamplingParams, TokenEvent
from engine.worker import Model

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

SETTINGS = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.8, top_p=0.9),
    SamplingParams(temperature=0, repetition_penalty=1.3),
    SamplingParams(temperature=1.2, top_k=40),
    SamplingParams(temperature=1.0, min_p=0.05),
)
TASKS = (
    "Say hi in three words.",
    "Explain what a hash map is, to a child.",
    "Write a poem about the sea, in the style of a long and winding letter to a friend who lives far away.",
    "Count from one to ten.",
    "Say hi in three words, and then tell me why.",
)


@pytest.fixture(scope="module")
def wrapped() -> Model:
    path = embedded_checkpoint(EngineConfig.cache_dir)
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    assert pack_linears(model) == 211
    return model_of(model, Tokenizer(AutoTokenizer.from_pretrained(path)), EngineConfig(max_model_len=1024))


async def run(
    wrapped: Model, requests: Sequence[GenerationRequest], *, at_once: bool
) -> list[list[TokenEvent]]:
    info = ModelInfo(
        name="x",
        vocab_size=wrapped.runner.vocab_size,
        tokenizer_vocab_size=wrapped.tokenizer.vocab_size,
        dtype=wrapped.runner.dtype,
        max_model_len=wrapped.max_model_len,
    )
    engine = Engine(EngineConfig(), lambda config: (wrapped, info))
    engine.start()
    await engine.wait_ready()

    async def one(request: GenerationRequest) -> list[TokenEvent]:
        outbox, tokens = engine.submit(request), []
        while True:
            events = await outbox.take()
            tokens += [each for each in events if isinstance(each, TokenEvent)]
            if isinstance(events[-1], Finish):
                engine.cancel(request.request_id)
                return tokens

    if at_once:
        results = await asyncio.gather(*map(one, requests))
    else:
        results = [await one(each) for each in requests]
    await engine.stop()
    return list(results)


def test_mixed_company_changes_nothing(wrapped: Model) -> None:
    assert wrapped.runner.is_batched
    requests = [
        GenerationRequest(
            request_id=str(place),
            prompt_token_ids=tuple(
                wrapped.tokenizer.encode(
                    wrapped.tokenizer.render_chat([{"role": "user", "content": TASKS[place % len(TASKS)]}])
                )
            ),
            max_tokens=8 + 5 * place,
            sampling=SETTINGS[place % len(SETTINGS)],
            seed=place,
            row_dtype=RowDtype.FLOAT32,
            logprobs=True,
        )
        for place in range(6)
    ]
    together = asyncio.run(run(wrapped, requests, at_once=True))
    alone = asyncio.run(run(wrapped, requests, at_once=False))
    again = asyncio.run(run(wrapped, requests, at_once=False))
    for place, (one, other, third) in enumerate(zip(together, alone, again, strict=True)):
        assert [each.token_id for each in one] == [each.token_id for each in other], place
        # The same seed in an engine started anew.
        assert [each.token_id for each in third] == [each.token_id for each in other], place
        for first, second in zip(one, other, strict=True):
            assert first.row is not None
            assert second.row is not None
            np.testing.assert_allclose(first.row, second.row, atol=1e-3)
            assert first.logprob == pytest.approx(second.logprob, abs=1e-3)
