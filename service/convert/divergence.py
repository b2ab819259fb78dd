"""Divergences: two contexts and a completion to engine requests, events to scalars in the unit asked for."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import ContextLengthError
from engine.tokenizer import Tokenizer
from engine.types import Contrast, Divergence, GenerationRequest, ModelInfo, SamplingParams
from schemas.scoring import DivergenceAnswer, DivergenceRequest, MeanDivergence
from service.convert.choice import Choice
from service.convert.dialect import MIN_LOGPROB
from service.convert.plan import Plan
from service.convert.scoring import (
    check_length,
    context_ids,
    context_problems,
    needs_text,
    new_plan,
    usage_of,
)
from service.errors import Problem, ProblemsError
from service.settings import Settings

DEFAULT_MAX_TOKENS = 256

DRAWING = ("do_sample", "seed", "top_p", "top_k", "min_p")
"""Fields that make a generated completion a draw."""

GENERATING = (
    "max_tokens",
    *DRAWING,
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
)
"""Fields that say how a completion is generated."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two contexts and what is to follow them.

    Attributes:
        plan: What the answer has in common with others; its prompts are the two contexts.
        completion: The ids that follow both; ``None`` if they are generated first.
        generation: What generates them, if anything does.
        log_base: The unit of the divergences.
        temperature: Divides both rows before they are compared.
        priority: In the queue.
    """

    plan: Plan
    completion: tuple[int, ...] | None
    generation: GenerationRequest | None
    log_base: str | int
    temperature: float
    priority: int

    def request(self, completion: Sequence[int]) -> GenerationRequest:
        """Return what compares the two contexts' rows of a completion."""
        p, q = self.plan.prompts
        return GenerationRequest(
            request_id=f"{self.plan.id}-1",
            prompt_token_ids=(*p, *completion),
            max_tokens=0,
            prompt_start=len(p),
            contrast=Contrast(token_ids=(*q, *completion), start=len(q), temperature=self.temperature),
            priority=self.priority,
        )


def check_divergence(request: DivergenceRequest) -> None:
    """Refuse combinations that contradict each other.

    Raises:
        ProblemsError: With every problem found.
    """
    problems = [*context_problems(request.p, "p"), *context_problems(request.q, "q")]
    if request.completion is not None:
        problems += [
            Problem("invalid_value", "is for a generated completion, and this request brings its own", name)
            for name in GENERATING
            if getattr(request, name) is not None
        ]
    if request.min_tokens and request.min_tokens > (request.max_tokens or DEFAULT_MAX_TOKENS):
        problems.append(Problem("invalid_value", "more tokens than may come at most", "min_tokens"))
    if problems:
        raise ProblemsError(problems)


def plan_divergence(
    request: DivergenceRequest, tokenizer: Tokenizer, info: ModelInfo, settings: Settings
) -> Comparison:
    """Return what to compare. Takes long for long texts: not for the event loop.

    Raises:
        ProblemsError: An id is not in the vocabulary.
        ContextLengthError: A context and the completion do not fit the model's context.
        InvalidRequestError: The chat template refuses messages.
    """
    if request.stop:
        needs_text(tokenizer, "stop")
    p, q = (
        tuple(context_ids(context, name, tokenizer, info, settings))
        for name, context in (("p", request.p), ("q", request.q))
    )
    completion = _completion(request, p, tokenizer, info)
    longest = max(len(p), len(q))
    asked = request.max_tokens if completion is None else len(completion)
    if longest + (asked or 1) > info.max_model_len:
        raise ContextLengthError(longest, asked, info.max_model_len)
    room = info.max_model_len - longest
    sampling = _sampling(request)
    plan = new_plan("divergence", [p, q], info, settings, do_sample=sampling.temperature > 0)
    generation = None
    if completion is None:
        generation = GenerationRequest(
            request_id=f"{plan.id}-0",
            prompt_token_ids=p,
            max_tokens=min(DEFAULT_MAX_TOKENS, room) if request.max_tokens is None else request.max_tokens,
            sampling=sampling,
            seed=request.seed,
            stop=tuple([request.stop] if isinstance(request.stop, str) else request.stop or []),
            stop_token_ids=frozenset(request.stop_token_ids or ()),
            ignore_eos=bool(request.ignore_eos),
            min_tokens=request.min_tokens or 0,
            priority=request.priority or 0,
        )
    return Comparison(
        plan,
        completion,
        generation,
        request.log_base or 2,
        1.0 if request.temperature is None else request.temperature,
        request.priority or 0,
    )


def _completion(
    request: DivergenceRequest, p: tuple[int, ...], tokenizer: Tokenizer, info: ModelInfo
) -> tuple[int, ...] | None:
    """Return the ids of the completion, if the request brings one. As text, it is read behind ``p``."""
    given = request.completion
    if given is None:
        return None
    if isinstance(given, str):
        needs_text(tokenizer, "completion")
        check_length(given, tokenizer, info)
        return tuple(tokenizer.encode_continuation(p, given))
    for place, token_id in enumerate(given.token_ids):
        if token_id >= info.vocab_size:
            message = f"token id {token_id} is not in 0..{info.vocab_size - 1}"
            raise ProblemsError([Problem("invalid_value", message, f"completion.token_ids[{place}]")])
    return tuple(given.token_ids)


def _sampling(request: DivergenceRequest) -> SamplingParams:
    """Return how a completion is chosen: greedily, unless the request says how to draw."""
    draws = any(getattr(request, name) is not None for name in DRAWING) and request.do_sample is not False
    temperature = 1.0 if request.temperature is None else request.temperature
    return SamplingParams(
        temperature=temperature if draws else 0.0,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=max(request.top_k or 0, 0),
        min_p=request.min_p or 0.0,
        repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
        frequency_penalty=request.frequency_penalty or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
    )


def divergence_answer(
    comparison: Comparison,
    token_ids: Sequence[int],
    values: Sequence[Divergence],
    choices: Sequence[Choice],
    tokenizer: Tokenizer,
) -> DivergenceAnswer:
    """Return the whole answer.

    Args:
        comparison: What was compared.
        token_ids: Of the completion, at least one.
        values: One for each of them, in nats.
        choices: Of the requests that were run.
        tokenizer: The model's.
    """
    unit = 1.0 if comparison.log_base == "e" else math.log(2)
    columns: dict[str, Any] = {
        name: [getattr(each, name) / unit for each in values]
        for name in ("jsd", "kl_pq", "kl_qp", "entropy_p", "entropy_q")
    }
    columns["tvd"] = [each.tvd for each in values]
    plan = comparison.plan
    return DivergenceAnswer(
        model=plan.model,
        created=plan.created,
        log_base="e" if comparison.log_base == "e" else 2,
        token_ids=list(token_ids),
        tokens=[tokenizer.token_text(each) for each in token_ids],
        **columns,
        logprob_p=[max(each.logprob_p, MIN_LOGPROB) for each in values],
        logprob_q=[max(each.logprob_q, MIN_LOGPROB) for each in values],
        mean=MeanDivergence(
            **{name: sum(columns[name]) / len(values) for name in ("jsd", "kl_pq", "kl_qp", "tvd")}
        ),
        usage=usage_of(plan.num_prompt_tokens, len(token_ids), choices),
    )
