"""Tokens and rows against ``model.generate(output_logits=True)``, which defines what is right."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from engine import scoring
from engine.config import EngineConfig
from engine.engine import Engine
from engine.fake import byte_tokenizer
from engine.loading import embedded_checkpoint, model_of
from engine.tokenizer import Tokenizer
from engine.types import Finish, GenerationRequest, ModelInfo, RowDtype, SamplingParams, TokenEvent
from tests.model.tiny import ARCHITECTURES, VOCAB_SIZE, tiny_model

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

GREEDY = SamplingParams(temperature=0)
TOLERANCE = 1e-3


def reference(
    model: PreTrainedModel, prompt: Sequence[int], max_tokens: int, num_ids: int
) -> tuple[list[int], np.ndarray]:
    """Return what ``generate`` makes of a prompt: ids and raw rows (T, V)."""
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=max_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        # As here, padding rows of the head are never chosen; the raw rows keep them.
        suppress_tokens=list(range(num_ids, model.config.vocab_size)) or None,
    )
    return output.sequences[0, len(prompt) :].tolist(), torch.cat(output.logits).numpy()


async def run(
    model: PreTrainedModel, tokenizer: Tokenizer, requests: Sequence[GenerationRequest]
) -> list[list[TokenEvent]]:
    """Run requests at once; return the tokens of each."""
    wrapped = model_of(model, tokenizer, EngineConfig(max_model_len=512))
    info = ModelInfo(
        name="x",
        vocab_size=wrapped.runner.vocab_size,
        tokenizer_vocab_size=tokenizer.vocab_size,
        dtype=wrapped.runner.dtype,
        max_model_len=512,
    )
    engine = Engine(EngineConfig(), lambda config: (wrapped, info))
    engine.start()
    await engine.wait_ready()
    outboxes = [engine.submit(each) for each in requests]
    results = []
    for outbox in outboxes:
        tokens: list[TokenEvent] = []
        while True:
            events = await outbox.take()
            tokens += [each for each in events if isinstance(each, TokenEvent)]
            if isinstance(events[-1], Finish):
                break
        results.append(tokens)
    await engine.stop()
    return results


def request(
    name: str, prompt: Sequence[int], max_tokens: int, sampling: SamplingParams = GREEDY
) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        max_tokens=max_tokens,
        sampling=sampling,
        seed=11,
        row_dtype=RowDtype.FLOAT32,
        logprobs=True,
        num_top_logprobs=1,
    )


def rows_of(tokens: Sequence[TokenEvent]) -> np.ndarray:
    return np.stack([each.row for each in tokens if each.row is not None])


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_tiny_models_give_generates_tokens_and_rows(architecture: str) -> None:
    model, rng = tiny_model(architecture), np.random.default_rng(0)
    prompts = [rng.integers(0, 256, length).tolist() for length in (5, 17, 1)]
    requests = [request(str(place), prompt, 20) for place, prompt in enumerate(prompts)]
    results = asyncio.run(run(model, byte_tokenizer(), requests))
    for prompt, tokens in zip(prompts, results, strict=True):
        ids, rows = reference(model, prompt, 20, 261)
        num = len(tokens)
        assert [each.token_id for each in tokens] == ids[:num]
        assert num == 20 or ids[num - 1] == byte_tokenizer().eos_token_id
        np.testing.assert_allclose(rows_of(tokens), rows[:num], atol=TOLERANCE)


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_rows_are_raw_under_any_sampling(architecture: str) -> None:
    """A forced forward over the sampled ids gives the same rows, so no setting has touched them."""
    model = tiny_model(architecture)
    wild = SamplingParams(temperature=2.5, top_p=0.8, top_k=20, min_p=0.01, repetition_penalty=1.4)
    prompt = list(b"The quick brown fox")
    (tokens,) = asyncio.run(run(model, byte_tokenizer(), [request("a", prompt, 24, wild)]))
    ids = [each.token_id for each in tokens]
    assert len(set(ids)) > 3
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    np.testing.assert_allclose(rows_of(tokens), logits.numpy(), atol=TOLERANCE)
    logprobs = torch.log_softmax(logits.double(), -1)
    for token, row in zip(tokens, logprobs, strict=True):
        assert token.logprob == pytest.approx(float(row[token.token_id]), abs=1e-4)
        assert token.top_logprobs is not None
        if token.token_id == token.top_logprobs.token_ids[0]:
            assert token.logprob == token.top_logprobs.logprobs[0]


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt2", "qwen3_next"])
def test_prompt_rows_are_those_of_a_plain_forward_pass(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "MAX_ROW_BYTES", 7 * 4 * VOCAB_SIZE)
    model = tiny_model(architecture)
    prompt = list(b"A prompt of several chunks, all of whose rows are wanted.")
    wanted = replace(request("a", prompt, 3), prompt_row_dtype=RowDtype.FLOAT32)
    # The second one could start from the first one's cache, and must not.
    results = asyncio.run(run(model, byte_tokenizer(), [wanted, replace(wanted, request_id="b")]))
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0]
    for tokens in results:
        rows = [each for each in tokens if each.is_prompt]
        assert [each.token_id for each in rows] == prompt[1:]
        np.testing.assert_allclose(rows_of(rows), logits[:-1].numpy(), atol=TOLERANCE)
        np.testing.assert_allclose(rows_of(tokens[len(rows) :])[0], logits[-1].numpy(), atol=TOLERANCE)
        logprobs = torch.log_softmax(logits, -1)
        for place, token in enumerate(rows):
            assert token.logprob == pytest.approx(float(logprobs[place, token.token_id]), abs=1e-4)


@pytest.fixture(scope="module")
def smollm2() -> tuple[PreTrainedModel, Tokenizer]:
    path = embedded_checkpoint(EngineConfig.cache_dir)
    return AutoModelForCausalLM.from_pretrained(path).eval(), Tokenizer(AutoTokenizer.from_pretrained(path))


def test_the_real_model_gives_generates_tokens_and_rows(smollm2: tuple[PreTrainedModel, Tokenizer]) -> None:
    model, tokenizer = smollm2
    prompts = [
        tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": content}]))
        for content in (
            "Say hi in three words.",
            "What is a hash map? Explain it to a child, with an example.",
        )
    ]
    requests = [request(str(place), prompt, 24) for place, prompt in enumerate(prompts)]
    results = asyncio.run(run(model, tokenizer, requests))
    for prompt, tokens in zip(prompts, results, strict=True):
        ids, rows = reference(model, prompt, 24, tokenizer.vocab_size)
        assert [each.token_id for each in tokens] == ids
        np.testing.assert_allclose(rows_of(tokens), rows, atol=TOLERANCE)


def test_the_real_tokenizers_bytes_join_to_the_text(smollm2: tuple[PreTrainedModel, Tokenizer]) -> None:
    _, tokenizer = smollm2
    text = "Grüße, 世界 😀🧑\u200d🚀 x != y and a . b , c ?\n\n\ttab"
    ids = tokenizer.encode(text)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert tokenizer.decode(ids) == text
    detokenizer = tokenizer.detokenizer(skip_special_tokens=True)
    assert "".join([*map(detokenizer.push, ids), detokenizer.flush()]) == text
