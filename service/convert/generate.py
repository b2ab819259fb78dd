"""Tokens in, tokens out: requests to plans, tokens to choices of three modes, rendering and the way back."""

import base64
import io
from collections.abc import Sequence
from itertools import chain, groupby
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from engine.errors import ContextLengthError
from engine.grammar import Grammar
from engine.stopping import StopChecker
from engine.tokenizer import Tokenizer
from engine.types import GenerationRequest, ModelInfo, TokenEvent, TopLogprobs
from schemas.chat import ChatDelta, ChatRequest, ChoiceLogprobs
from schemas.completions import CompletionRequest
from schemas.generate import (
    DerenderedMessage,
    DerenderRequest,
    GenerateAnswer,
    GenerateChoice,
    GenerateRequest,
    IdLogprob,
    IdLogprobs,
    OutputMode,
    ParseContext,
    PromptLogprob,
    RenderedRequest,
    SampledLogprob,
)
from schemas.logits import Usage
from schemas.sampling import GenerationFields
from service.convert.chat import ChatPrompt, MessageDialect, message_of, new_call_id
from service.convert.choice import Choice, Echo, Token
from service.convert.completions import DEFAULT_MAX_TOKENS
from service.convert.dialect import MIN_LOGPROB, Put, generated_events
from service.convert.plan import Plan, check_fields, check_top_logprobs, choice_seed, plan_answer
from service.convert.reading import Reading, reading_of
from service.decode import Nested
from service.errors import Problem, ProblemsError
from service.negotiate import Representation
from service.settings import Settings

MAX_LOGPROBS = 20
"""vLLM's limit, unless the setting raises it."""

_NOT_SAMPLING = {"model", "stream", "stream_options", "max_tokens", "seed", "return_logprobs"}
_NO_EFFECT = {"user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"}

SAMPLING_PARAMS = Nested(
    "sampling_params",
    frozenset(
        {"token_ids", "request_id", "output_mode", "parse_context", "stream", "stream_options", "model"}
    ),
)
"""Where vLLM's clients put most fields."""


# Requests.


def check_generate(
    request: GenerateRequest, form: Representation, info: ModelInfo, settings: Settings
) -> Reading:
    """Refuse contradictions; return how the answer is read.

    Raises:
        ProblemsError: With every problem found.
    """
    problems = check_fields(request, form, settings)
    for name in ("logprobs", "prompt_logprobs"):
        problems += check_top_logprobs(getattr(request, name), MAX_LOGPROBS, settings, name)
    for name in ("token_ids", "logprob_token_ids", "stop_token_ids"):
        problems += _id_problems(name, getattr(request, name) or (), info)
    mode = request.output_mode or "tokens"
    if mode != "derender" and request.parse_context is not None:
        problems.append(Problem("invalid_value", "needs output_mode derender", "parse_context"))
    if mode != "tokens" and request.detokenize is False:
        problems.append(Problem("invalid_value", f"contradicts output_mode {mode}", "detokenize"))
    if mode != "tokens" and request.logprob_token_ids:
        problems.append(Problem("invalid_value", "needs output_mode tokens", "logprob_token_ids"))
    problems += _candidate_problems(request, info)
    if request.logprob_token_ids and request.logprobs is not None:
        problems.append(Problem("invalid_value", "come in place of logprobs", "logprob_token_ids"))
    if problems:
        raise ProblemsError(problems)
    return reading_of(request.parse_context)


def text_field_of(request: GenerateRequest) -> str | None:
    """Return the field for whose sake a request needs a tokenizer, if it needs one."""
    wants = {
        "output_mode": request.output_mode not in (None, "tokens"),
        "stop": bool(request.stop),
        "response_format": (request.response_format or {}).get("type", "text") != "text",
    }
    return next((name for name, is_wanted in wants.items() if is_wanted), None)


def _candidate_problems(request: GenerateRequest, info: ModelInfo) -> list[Problem]:
    """Return what is wrong with the candidates of the prompt's tokens."""
    name, start = "prompt_logprob_token_ids", request.prompt_logprob_start
    if request.prompt_logprob_token_ids is None:
        return [] if start is None else [Problem("invalid_value", f"needs {name}", "prompt_logprob_start")]
    problems = []
    num_rows = len(request.token_ids) - 1 - (start or 0)
    if len(request.prompt_logprob_token_ids) != num_rows or num_rows < 1:
        message = f"expected {max(num_rows, 0)} lists, one per prompt token behind prompt_logprob_start"
        problems.append(Problem("invalid_value", message, name))
    for place, ids in enumerate(request.prompt_logprob_token_ids):
        if found := _id_problems(f"{name}[{place}]", ids, info):
            problems += found
            break
    for other in ("prompt_logprobs", "return_prompt_logits", "stream"):
        if getattr(request, other) not in (None, False):
            problems.append(Problem("invalid_value", f"is not given beside {name}", other))
    return problems


def _id_problems(name: str, ids: Sequence[int], info: ModelInfo) -> list[Problem]:
    """Return the first id that is not in the vocabulary, as a problem."""
    for place, token_id in enumerate(ids):
        if token_id >= info.vocab_size:
            message = f"token id {token_id} is not in 0..{info.vocab_size - 1}"
            return [Problem("invalid_value", message, f"{name}[{place}]")]
    return []


def plan_generate(
    request: GenerateRequest,
    form: Representation,
    info: ModelInfo,
    settings: Settings,
    *,
    reading: Reading,
    grammar: Grammar | None,
) -> tuple[Plan, list[GenerationRequest]]:
    """Return what to answer, and what to generate: one engine request per choice.

    Raises:
        ServiceError: ``logit_budget_exceeded``.
    """
    ids = tuple(dict.fromkeys(request.logprob_token_ids or ()))
    has_entries = request.logprobs is not None or bool(request.return_logprobs) or bool(ids)
    return plan_answer(
        request,
        form,
        [request.token_ids],
        info,
        settings,
        kind="generate",
        max_tokens=request.max_tokens,
        wants_entries=has_entries,
        num_top_logprobs=request.logprobs or 0,
        num_prompt_top_logprobs=request.prompt_logprobs,
        grammar=grammar,
        grammar_after=reading.reasoning_end,
        request_id=request.request_id,
        others={
            "ranks": has_entries or request.prompt_logprobs is not None,
            "logprob_token_ids": ids,
            "sampling_support": bool(request.return_sampling_mask),
            **_candidates_of(request),
        },
    )


def _candidates_of(request: GenerateRequest) -> dict[str, Any]:
    """Return what the engine must know to score candidates of the prompt's tokens."""
    if request.prompt_logprob_token_ids is None:
        return {}
    return {
        "prompt_logprobs": True,
        "prompt_start": (request.prompt_logprob_start or 0) + 1,
        # What fills up is left out here, and put back in the answer.
        "prompt_logprob_token_ids": tuple(
            tuple(each for each in ids if each >= 0) for ids in request.prompt_logprob_token_ids
        ),
    }


# Answers.


class GenerateDialect(MessageDialect):
    """Ids, and with them nothing, a text, or a chat message."""

    def __init__(self, plan: Plan, tokenizer: Tokenizer, reading: Reading, request: GenerateRequest) -> None:
        """Prepare.

        Args:
            plan: Of the answer.
            tokenizer: The model's.
            reading: How a message is read; neutral in the other modes.
            request: Says what comes beside the ids.
        """
        super().__init__(plan, tokenizer, reading)
        self._mode: OutputMode = request.output_mode or "tokens"
        self._has_mask = bool(request.return_sampling_mask)
        self._candidates = request.prompt_logprob_token_ids

    def choice(
        self, index: int, *, keeps_tokens: bool = True, keeps_rows: bool = False, waits_for_text: bool = True
    ) -> Choice:
        """Return an empty completion; ids alone wait for nothing."""
        is_text = self._mode != "tokens"
        return super().choice(
            index,
            keeps_tokens=keeps_tokens,
            keeps_rows=keeps_rows,
            waits_for_text=waits_for_text and is_text,
        )

    def whole(
        self, choices: Sequence[Choice], *, num_rows: Sequence[int] | None = None, put: Put = list
    ) -> GenerateAnswer:
        """Return the whole answer, without the rows themselves."""
        return GenerateAnswer(
            **self._generate_head(),
            choices=[self._whole_choice(each, put) for each in choices],
            usage=self.usage(choices),
            metadata=self.plan.metadata(self._stop_sequence_hit(choices[0])),
            prompt_token_ids=self._prompt_token_ids(),
            prompt_logprobs=self._prompt_logprobs(choices[0].tokens, put, is_first=True),
            prompt_token_id_logprobs=self._candidate_scores(choices[0]),
            rows=UNSET if num_rows is None else list(num_rows),
        )

    def _generate_head(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "request_id": plan.id,
            "model": plan.model,
            "created": plan.created,
            "output_mode": self._mode,
        }

    def _whole_choice(self, choice: Choice, put: Put) -> GenerateChoice:
        assert choice.finish is not None
        generated = [token for token in choice.tokens if not token.is_prompt]
        events = generated_events(choice)
        return GenerateChoice(
            index=choice.index,
            text=choice.content if self._mode == "text" else UNSET,
            message=self._message(choice) if self._mode == "derender" else UNSET,
            logprobs=self._entries(generated, put),
            finish_reason=self.finish_reason(choice),
            stop_reason=choice.finish.stop_reason,
            token_ids=[event.token_id for event in events],
            segments=self._segments(generated),
            sampling_mask=self._masks(events, put),
            token_stats=self._stats(choice),
        )

    def _entries(self, tokens: Sequence[Token], put: Put = list) -> IdLogprobs | ChoiceLogprobs | None:
        if self._mode != "tokens":
            return self._logprobs(tokens, put)
        if not self.plan.wants_entries:
            return None
        events = [token.event for token in tokens if token.event is not None]
        return IdLogprobs(content=put(map(_sampled, events)))

    def _masks(self, events: Sequence[TokenEvent], put: Put = list) -> Any:
        return put(event.support or [] for event in events) if self._has_mask else UNSET

    def _prompt_logprobs(self, tokens: Sequence[Token], put: Put = list, *, is_first: bool) -> Any:
        """Return the entries of prompt tokens; the first token of all has none."""
        if not self.plan.wants_prompt_entries:
            return UNSET
        events = [token.event for token in tokens if token.is_prompt and token.event is not None]
        return put(chain([None] if is_first else [], map(self._prompt_entry, events)))

    def _candidate_scores(self, choice: Choice) -> str | UnsetType:
        """Return the scores of the prompt's candidates as a file of numpy's, if they are wanted."""
        if self._candidates is None:
            return UNSET
        scores = np.full((len(self._candidates), max(map(len, self._candidates))), -np.inf, np.float32)
        events = [token.event for token in choice.tokens if token.is_prompt and token.event is not None]
        # An answer that was aborted has the first ones only.
        for row, ids, event in zip(scores, self._candidates, events, strict=False):
            if event.id_logprobs is not None:
                row[: len(ids)][np.asarray(ids) >= 0] = event.id_logprobs.logprobs
        file = io.BytesIO()
        np.save(file, scores)
        return base64.b64encode(file.getvalue()).decode()

    def _prompt_entry(self, event: TokenEvent) -> dict[str, PromptLogprob]:
        return {
            str(each.token_id): PromptLogprob(
                logprob=each.logprob,
                rank=each.rank,
                decoded_token=self.tokenizer.token_text(each.token_id) if self.tokenizer.has_text else None,
            )
            for each in _candidates(event)
        }

    # Streams.

    def first_chunk(self, choice: Choice, usage: Usage | None) -> GenerateAnswer | None:
        """Return the chunk with the prompt's ids, if they are wanted; and in derender mode the role."""
        is_first = choice.index == 0
        delta = ChatDelta(role="assistant", content="") if self._mode == "derender" else UNSET
        has_prompt = is_first and (self.plan.wants_token_ids or self.plan.wants_prompt_entries)
        if delta is UNSET and not has_prompt:
            return None
        return self._generate_chunk(
            GenerateChoice(index=choice.index, text="" if self._mode == "text" else UNSET, delta=delta),
            usage,
            prompt_token_ids=self._prompt_token_ids() if is_first else UNSET,
            prompt_logprobs=[None] if is_first and self.plan.wants_prompt_entries else UNSET,
        )

    def chunks(self, choice: Choice, tokens: Sequence[Token], usage: Usage | None) -> list[GenerateAnswer]:
        """Return one chunk for each run of tokens of the same segment."""
        found = []
        for segment, grouped in groupby(tokens, key=lambda token: token.segment):
            run = list(grouped)
            if segment is None:
                if choice.index == 0:
                    extras = self._prompt_numbers(run)
                    extras["prompt_logprobs"] = self._prompt_logprobs(run, is_first=False)
                    found.append(self._generate_chunk(GenerateChoice(index=0), usage, **extras))
                continue
            numbers = self._numbers(run)
            events = [token.event for token in run if token.event is not None]
            numbers["token_ids"] = [event.token_id for event in events]
            numbers["segments"] = self._segments(run)
            wire = GenerateChoice(
                index=choice.index,
                text="".join(token.content for token in run) if self._mode == "text" else UNSET,
                delta=self._delta(choice.index, run) if self._mode == "derender" else UNSET,
                logprobs=self._entries(run),
                sampling_mask=self._masks(events),
                **numbers,
            )
            found.append(self._generate_chunk(wire, usage))
        return found

    def last_chunk(self, choice: Choice, usage: Usage | None) -> GenerateAnswer:
        """Return the chunk with the finish reason."""
        assert choice.finish is not None
        wire = GenerateChoice(
            index=choice.index,
            text="" if self._mode == "text" else UNSET,
            delta=ChatDelta() if self._mode == "derender" else UNSET,
            finish_reason=self.finish_reason(choice),
            stop_reason=choice.finish.stop_reason,
        )
        metadata = self.plan.metadata(self._stop_sequence_hit(choice)) if choice.index == 0 else UNSET
        return self._generate_chunk(wire, usage, metadata=metadata)

    def usage_chunk(self, usage: Usage) -> GenerateAnswer:
        """Return the chunk with the totals."""
        return GenerateAnswer(**self._generate_head(), choices=[], usage=usage)

    def _generate_chunk(self, wire: GenerateChoice, usage: Usage | None, **others: Any) -> GenerateAnswer:
        return GenerateAnswer(
            **self._generate_head(), choices=[wire], usage=self._chunk_usage(usage), **others
        )


def _candidates(event: TokenEvent) -> list[IdLogprob]:
    """Return the token of a position, then the best others or those asked for."""
    assert event.logprob is not None
    sampled = IdLogprob(token_id=event.token_id, logprob=max(event.logprob, MIN_LOGPROB), rank=event.rank)
    if event.id_logprobs is not None:
        others = zip(event.id_logprobs.token_ids, event.id_logprobs.logprobs, strict=True)
        named = [
            IdLogprob(token_id=token_id, logprob=max(value, MIN_LOGPROB), rank=None)
            for token_id, value in others
        ]
        return [sampled, *(each for each in named if each.token_id != event.token_id)]
    best = event.top_logprobs or TopLogprobs([], [])
    ranks = [best.logprobs.index(value) + 1 for value in best.logprobs]
    return [
        sampled,
        *(
            IdLogprob(token_id=token_id, logprob=max(value, MIN_LOGPROB), rank=rank)
            for token_id, value, rank in zip(best.token_ids, best.logprobs, ranks, strict=True)
            if token_id != event.token_id
        ),
    ]


def _sampled(event: TokenEvent) -> SampledLogprob:
    first, *others = _candidates(event)
    has_top = event.top_logprobs is not None or event.id_logprobs is not None
    return SampledLogprob(
        token_id=first.token_id,
        logprob=first.logprob,
        rank=first.rank,
        top_logprobs=[first, *others] if has_top else [],
    )


# Rendering, and the way back.


def check_fits(num_prompt_tokens: int, max_tokens: int | None, info: ModelInfo) -> None:
    """Refuse a prompt that would not fit the context with what is to follow it.

    Raises:
        ContextLengthError: It does not fit.
    """
    if num_prompt_tokens + (1 if max_tokens is None else max_tokens) > info.max_model_len:
        raise ContextLengthError(num_prompt_tokens, max_tokens, info.max_model_len)


def rendered_chat(request: ChatRequest, prompt: ChatPrompt, model: str) -> RenderedRequest:
    """Return the body that generates what a chat request would."""
    sampling = _sampling_params(request)
    limit = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    if limit is not None:
        sampling["max_tokens"] = limit
    if request.seed is not None:
        sampling["seed"] = request.seed
    if request.logprobs or (request.logprobs is None and request.return_logprobs):
        sampling["logprobs"] = request.top_logprobs or 0
    return RenderedRequest(
        model=model,
        token_ids=prompt.token_ids,
        sampling_params=sampling,
        stream=bool(request.stream),
        stream_options=request.stream_options or UNSET,
        output_mode="derender",
        parse_context=prompt.reading.context(request),
    )


def rendered_completions(
    request: CompletionRequest, prompts: Sequence[Echo], model: str
) -> list[RenderedRequest]:
    """Return the bodies, one per prompt, that generate what a completion request would.

    Raises:
        ProblemsError: The request wants its prompt echoed, which ids alone cannot be.
    """
    if request.echo:
        raise ProblemsError([Problem("unsupported_parameter", "cannot be rendered", "echo")])
    found = []
    for place, prompt in enumerate(prompts):
        sampling = _sampling_params(request)
        sampling["max_tokens"] = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
        if request.seed is not None:
            sampling["seed"] = choice_seed(request.seed, place)
        if request.logprobs is not None or request.return_logprobs:
            sampling["logprobs"] = request.logprobs or 0
        found.append(
            RenderedRequest(
                model=model,
                token_ids=list(prompt.token_ids),
                sampling_params=sampling,
                stream=bool(request.stream),
                stream_options=request.stream_options or UNSET,
                output_mode="text",
            )
        )
    return found


def _sampling_params(request: GenerationFields) -> dict[str, Any]:
    """Return the shared fields that a request states and that change what is generated or returned."""
    names = (field.name for field in msgspec.structs.fields(GenerationFields))
    return {
        name: value
        for name in names
        if name not in _NOT_SAMPLING | _NO_EFFECT and (value := getattr(request, name)) is not None
    }


def derender(request: DerenderRequest, tokenizer: Tokenizer, info: ModelInfo) -> DerenderedMessage:
    """Return the message that ids spell. Takes long for many ids: not for the event loop.

    Raises:
        ProblemsError: The context cannot be used, or an id is not in the vocabulary.
        ContextLengthError: No answer of the model has so many tokens.
    """
    if len(request.token_ids) > info.max_model_len:
        raise ContextLengthError(len(request.token_ids), None, info.max_model_len)
    if problems := _id_problems("token_ids", request.token_ids, info):
        raise ProblemsError(problems)
    context = request.parse_context or ParseContext()
    reading = reading_of(context)
    splitting = reading.splitting(tokenizer)
    checker = StopChecker(
        tokenizer.detokenizer(skip_special_tokens=context.skip_special_tokens),
        eos_token_ids=(),
        stop_token_ids={token_id: token_id for token_id in context.stop_token_ids},
        stop=context.stop,
        max_tokens=len(request.token_ids),
        min_tokens=context.min_tokens,
        include_stop=context.include_stop_str_in_output,
    )
    choice = Choice(0, tokenizer, splitting=splitting, keeps_tokens=False)
    for token_id in request.token_ids:
        texts, stopped = checker.push(token_id)
        choice.add([TokenEvent(token_id, texts)])
        if stopped is not None:
            break
    choice.close()
    message = message_of(choice, new_call_id, is_split=splitting is not None)
    reason = request.finish_reason or "stop"
    if reason == "stop" and message.tool_calls and not reading.is_named:
        reason = "tool_calls"
    return DerenderedMessage(message=message, finish_reason=reason)
