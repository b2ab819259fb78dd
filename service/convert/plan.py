"""What an answer is to hold, and what the engine must generate for it: one translation for all endpoints."""

import hashlib
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from engine.grammar import Grammar
from engine.types import BYTES_PER_VALUE, GenerationRequest, ModelInfo, RowDtype, SamplingParams
from schemas.logits import LogitsEncoding, Metadata
from schemas.sampling import GenerationFields
from service.errors import Problem, ProblemsError, ServiceError
from service.negotiate import Representation
from service.settings import Settings
from service.structured import read_response_format

JSON_BYTES_PER_VALUE = 12
"""Of a logit as decimal text, roughly; only for estimates."""

VALUES_PER_ALTERNATIVE = 7
"""An alternative's string, bytes and logprob as text take as much room as so many logits, roughly."""

ObjectName = Literal["chat.completion", "text_completion", "generate", "logits", "divergence"]

ID_PREFIXES: dict[ObjectName, str] = {
    "chat.completion": "chatcmpl",
    "text_completion": "cmpl",
    "generate": "gen",
    "logits": "logits",
    "divergence": "div",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What an answer is to hold, and what stands in all of its parts.

    Attributes:
        prompts: The ids of each prompt; choice ``i`` continues prompt ``i // choices_per_prompt``.
        wants_rows: Whole raw rows of the generated tokens.
        wants_entries: Logprobs entries of the generated tokens.
        wants_prompt_rows: Whole raw rows that predict the prompts' tokens.
        wants_prompt_entries: Logprobs entries of the prompts' tokens.
        has_usage, has_running_usage: Whether a stream ends with the totals, and has counts in each chunk.
        names_ids: Whether token strings are written as ``token_id:N``.
        width: Alternatives and other ids that one token may bring along.
        keep_alive_s: Seconds of silence after which a stream of events gets a comment.
    """

    id: str
    object: ObjectName
    created: int
    model: str
    info: ModelInfo
    encoding: LogitsEncoding
    wants_rows: bool
    wants_entries: bool
    num_top_logprobs: int
    wants_token_ids: bool
    do_sample: bool
    arrow_compression: str | None
    prompts: tuple[tuple[int, ...], ...]
    choices_per_prompt: int = 1
    wants_stats: bool = False
    logit_token_ids: tuple[int, ...] = ()
    wants_prompt_rows: bool = False
    wants_prompt_entries: bool = False
    has_usage: bool = False
    has_running_usage: bool = False
    names_ids: bool = False
    width: int = 0
    keep_alive_s: float = 5.0

    @property
    def row_dtype(self) -> RowDtype | None:
        """The dtype in which whole rows leave the engine, if any do."""
        if not (self.wants_rows or self.wants_prompt_rows):
            return None
        return RowDtype.FLOAT16 if self.encoding == "b64_fp16" else RowDtype.FLOAT32

    @property
    def num_choices(self) -> int:
        """Completions of all prompts together."""
        return len(self.prompts) * self.choices_per_prompt

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts together; each counts once, however many choices continue it."""
        return sum(map(len, self.prompts))

    @property
    def num_prompt_rows(self) -> int:
        """Rows of prompts that the answer holds."""
        return sum(len(prompt) - 1 for prompt in self.prompts) if self.wants_prompt_rows else 0

    def prompt_of(self, choice: int) -> tuple[int, ...]:
        """Return the ids of the prompt that a choice continues."""
        return self.prompts[choice // self.choices_per_prompt]

    def has_prompt_rows(self, choice: int) -> bool:
        """Tell whether a choice brings its prompt's rows along; the first one of each prompt does."""
        return self.wants_prompt_rows and choice % self.choices_per_prompt == 0

    def metadata(self, stop_sequence_hit: str | None = None) -> Metadata:
        """Return the statements on the answer's numbers."""
        return Metadata(
            stop_sequence_hit=stop_sequence_hit,
            vocab_size=self.info.vocab_size,
            tokenizer_vocab_size=self.info.tokenizer_vocab_size,
            source_dtype=self.info.dtype,
            wire_dtype=self.row_dtype,
            do_sample=self.do_sample,
        )


def check_fields(request: GenerationFields, form: Representation, settings: Settings) -> list[Problem]:
    """Return the contradictions among the fields that all endpoints share."""
    problems = []
    if (request.n or 1) > settings.max_queue:
        problems.append(
            Problem("invalid_value", f"each choice waits in the queue, which holds {settings.max_queue}", "n")
        )
    if request.stream_options is not None and not request.stream:
        problems.append(Problem("invalid_value", "needs stream: true", "stream_options"))
    if request.return_prompt_logits and request.logit_token_ids:
        problems.append(
            Problem(
                "unsupported_parameter", "is not supported beside logit_token_ids", "return_prompt_logits"
            )
        )
    if request.do_sample and request.temperature == 0:
        problems.append(Problem("invalid_value", "contradicts temperature 0, which is greedy", "do_sample"))
    if form is Representation.ARROW and request.logits_encoding == "json":
        problems.append(
            Problem("invalid_value", "an Arrow answer holds b64_fp16 or b64_fp32 rows", "logits_encoding")
        )
    ignores_unknown = settings.unknown_fields == "ignore"
    problems += read_response_format(request.response_format, ignore_unknown=ignores_unknown)[1]
    problems += [
        Problem("invalid_value", message, f"logit_bias.{name[:20]}")
        for name, value in (request.logit_bias or {}).items()
        if (message := _bias_fault(name, value))
    ]
    return problems


def _bias_fault(name: str, value: float) -> str:
    """Return what is wrong with one bias, if anything."""
    # Python's own digits of other scripts, signs and lower lines are no token ids.
    if not (name.isascii() and name.isdecimal() and len(name) < 10):
        return "keys are token ids"
    return "" if -100 <= value <= 100 else "a bias is from -100 to 100"


def check_top_logprobs(num: int | None, cap: int, settings: Settings, name: str) -> list[Problem]:
    """Return what is wrong with a number of alternatives.

    Args:
        num: What was asked for; -1 is all of V.
        cap: OpenAI's limit of the endpoint; the setting may raise it.
        settings: Holds that setting.
        name: Of the field.
    """
    limit = settings.max_top_logprobs
    if num is None or limit == -1:
        return []
    cap = max(cap, limit)
    if num > cap or num == -1:
        return [Problem("invalid_value", f"at most {cap} alternatives here; see MAX_TOP_LOGPROBS", name)]
    return []


def plan_answer(
    request: GenerationFields,
    form: Representation,
    prompts: Sequence[Sequence[int]],
    info: ModelInfo,
    settings: Settings,
    *,
    kind: ObjectName,
    max_tokens: int | None,
    max_tokens_name: str = "max_tokens",
    wants_entries: bool,
    num_top_logprobs: int,
    num_prompt_top_logprobs: int | None = None,
    grammar: Grammar | None = None,
    grammar_after: str | None = None,
    request_id: str | None = None,
    others: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[Plan, list[GenerationRequest]]:
    """Return what to answer, and what to generate: one engine request per choice.

    Args:
        request: The fields that all endpoints share.
        form: What is asked for by ``Accept``.
        prompts: Ids of each prompt.
        info: Of the model.
        settings: Limits and names.
        kind: The endpoint's object name.
        max_tokens: Tokens of each choice; ``None`` fills the context.
        max_tokens_name: Of the field that says so.
        wants_entries: Whether a JSON answer has logprobs entries.
        num_top_logprobs: Alternatives of each entry; -1 is all of V.
        num_prompt_top_logprobs: Alternatives of each entry of the prompts' tokens; ``None`` if those have
            no entries.
        grammar: What each choice obeys.
        grammar_after: The text behind which it starts.
        request_id: The answer's id; ``None`` makes one.
        others: Further attributes of the engine's requests.

    Raises:
        ServiceError: ``logit_budget_exceeded``.
    """
    is_arrow = form is Representation.ARROW
    logit_token_ids = tuple(request.logit_token_ids or ())
    wants_rows = is_arrow if request.return_logits is None else request.return_logits
    # Selected columns come in place of whole rows.
    wants_rows = wants_rows and not logit_token_ids
    wants_prompt_rows = bool(request.return_prompt_logits)
    # A column without nulls holds rows for all tokens or for none.
    wants_rows = wants_rows or (is_arrow and wants_prompt_rows)
    sampling = _sampling(request, info, settings)
    if bad := [token_id for token_id, _ in sampling.logit_bias if token_id >= info.vocab_size]:
        message = f"token id {bad[0]} is not in 0..{info.vocab_size - 1}"
        raise ProblemsError([Problem("invalid_value", message, f"logit_bias.{bad[0]}")])
    options = request.stream_options if request.stream else None
    plan = Plan(
        id=request_id or f"{ID_PREFIXES[kind]}-{uuid.uuid4().hex}",
        object=kind,
        created=int(time.time()),
        model=settings.served_model_name or info.name,
        info=info,
        encoding=request.logits_encoding or "b64_fp16",
        wants_rows=wants_rows,
        wants_entries=wants_entries,
        num_top_logprobs=_or_all(num_top_logprobs, info) if wants_entries else 0,
        wants_token_ids=wants_rows
        or wants_prompt_rows
        or bool(request.return_logits)
        or bool(request.return_token_ids),
        wants_stats=bool(request.token_stats),
        logit_token_ids=logit_token_ids,
        do_sample=sampling.temperature > 0,
        arrow_compression=request.arrow_compression,
        prompts=tuple(map(tuple, prompts)),
        choices_per_prompt=request.n or 1,
        wants_prompt_rows=wants_prompt_rows,
        wants_prompt_entries=num_prompt_top_logprobs is not None,
        has_usage=options is not None and bool(options.include_usage),
        has_running_usage=options is not None and bool(options.continuous_usage_stats),
        names_ids=bool(request.return_tokens_as_token_ids),
        width=max(
            _or_all(num_top_logprobs, info) if wants_entries else 0,
            _or_all(num_prompt_top_logprobs or 0, info),
            info.vocab_size if others.get("sampling_support") else 0,
        ),
        keep_alive_s=settings.keep_alive,
    )
    # An Arrow answer, or any other stream, has some rows in its outbox only. A JSON answer keeps them all.
    is_stream = is_arrow or bool(request.stream)
    held_bytes = 0
    try:
        if plan.row_dtype is not None:
            max_tokens = _within_budget(max_tokens, plan, settings, is_arrow=is_arrow, is_stream=is_stream)
            row_bytes = info.vocab_size * np.dtype(plan.row_dtype.value).itemsize
            held_bytes = (max_tokens * wants_rows + plan.num_prompt_rows) * row_bytes
        elif logit_token_ids:
            max_tokens = _within_text_budget(
                max_tokens, len(logit_token_ids), plan, settings, is_stream=is_stream
            )
            held_bytes = max_tokens * len(logit_token_ids) * BYTES_PER_VALUE
        num_values = plan.num_top_logprobs * VALUES_PER_ALTERNATIVE
        if others.get("sampling_support"):
            # At most all ids, each written in about half the room of a logit.
            num_values += info.vocab_size // 2
        if num_values:
            max_tokens = _within_text_budget(max_tokens, num_values, plan, settings, is_stream=is_stream)
            num_held = 2 * plan.num_top_logprobs + info.vocab_size * bool(others.get("sampling_support"))
            held_bytes += max_tokens * num_held * BYTES_PER_VALUE
        num_prompt = _or_all(num_prompt_top_logprobs or 0, info)
        num_values = plan.num_prompt_tokens * num_prompt * VALUES_PER_ALTERNATIVE
        num_values += sum(map(len, others.get("prompt_logprob_token_ids", ())))
        _check_prompt_budget(num_values, settings, is_stream=is_stream)
        held_bytes += 2 * num_values * BYTES_PER_VALUE // VALUES_PER_ALTERNATIVE
    except ServiceError as error:
        raise ServiceError(error.code, str(error), max_tokens_name) from error
    if held_bytes:
        if is_stream:
            held_bytes = min(held_bytes, settings.outbox_bytes)
        # The choices of one request must fit beside each other, or they would wait for each other for ever.
        held_bytes = min(held_bytes, settings.row_budget_bytes // plan.num_choices)
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    first = GenerationRequest(
        request_id="",
        prompt_token_ids=(),
        max_tokens=max_tokens,
        sampling=sampling,
        seed=request.seed,
        stop=tuple(stop),
        stop_token_ids=frozenset(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        min_tokens=request.min_tokens or 0,
        include_stop=bool(request.include_stop_str_in_output),
        skip_special_tokens=request.skip_special_tokens is not False,
        priority=request.priority or 0,
        row_dtype=plan.row_dtype if wants_rows else None,
        logprobs=wants_entries or is_arrow,
        num_top_logprobs=plan.num_top_logprobs,
        token_stats=plan.wants_stats,
        logit_token_ids=logit_token_ids,
        prompt_logprobs=plan.wants_prompt_entries,
        num_prompt_top_logprobs=_or_all(num_prompt_top_logprobs or 0, info),
        held_bytes=held_bytes,
        grammar=grammar,
        grammar_after=grammar_after if grammar is not None else None,
    )
    if request.min_tokens and max_tokens is not None and request.min_tokens > max_tokens:
        message = f"more than the {max_tokens} tokens that may come at most"
        raise ProblemsError([Problem("invalid_value", message, "min_tokens")])
    return plan, [
        replace(
            first,
            **others,
            request_id=f"{plan.id}-{choice}",
            prompt_token_ids=plan.prompt_of(choice),
            seed=choice_seed(
                choice_seed(request.seed, choice // plan.choices_per_prompt), choice % plan.choices_per_prompt
            ),
            prompt_row_dtype=plan.row_dtype if plan.has_prompt_rows(choice) else None,
        )
        for choice in range(plan.num_choices)
    ]


def _or_all(num: int, info: ModelInfo) -> int:
    """Return a number of alternatives; -1 is all of V."""
    return info.vocab_size if num < 0 else num


def _sampling(request: GenerationFields, info: ModelInfo, settings: Settings) -> SamplingParams:
    """Return how tokens are chosen. What the request leaves open is neutral, or the checkpoint's own."""
    default = info.sampling if settings.sampling_defaults == "model" else SamplingParams()
    temperature = default.temperature if request.temperature is None else request.temperature
    if request.do_sample is False:
        temperature = 0.0
    elif request.do_sample and temperature == 0:
        temperature = 1.0
    return SamplingParams(
        temperature=temperature,
        top_p=default.top_p if request.top_p is None else request.top_p,
        top_k=default.top_k if request.top_k is None else max(request.top_k, 0),
        min_p=default.min_p if request.min_p is None else request.min_p,
        repetition_penalty=default.repetition_penalty
        if request.repetition_penalty is None
        else request.repetition_penalty,
        frequency_penalty=request.frequency_penalty or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        logit_bias=tuple((int(name), bias) for name, bias in (request.logit_bias or {}).items()),
    )


def choice_seed(seed: int | None, choice: int) -> int | None:
    """Return the seed of one of several prompts or choices: a stream of its own, but the same each time."""
    if seed is None or choice == 0:
        return seed
    digest = hashlib.blake2b(f"{seed} {choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _check_prompt_budget(num_values: int, settings: Settings, *, is_stream: bool) -> None:
    """Refuse a JSON answer with more numbers of the prompt's tokens than it may hold."""
    num_bytes = num_values * JSON_BYTES_PER_VALUE
    if num_bytes > settings.max_answer_bytes and not is_stream:
        raise ServiceError(
            "logit_budget_exceeded",
            f"the numbers of the prompt's tokens would take {num_bytes:,} bytes; MAX_ANSWER_BYTES allows "
            f"{settings.max_answer_bytes:,}",
        )


def _within_text_budget(
    max_tokens: int | None, num_values: int, plan: Plan, settings: Settings, *, is_stream: bool
) -> int:
    """Return how many tokens may come, each with so many numbers, that one JSON answer holds."""
    room = max(plan.info.max_model_len - max(map(len, plan.prompts)), 1)
    token_bytes = plan.num_choices * num_values * JSON_BYTES_PER_VALUE
    cap = max(settings.max_answer_bytes // token_bytes, 1)
    if max_tokens is None:
        return room if is_stream else min(cap, room)
    if max_tokens > cap and not is_stream:
        raise ServiceError(
            "logit_budget_exceeded",
            f"the numbers of {max_tokens} tokens would take {max_tokens * token_bytes:,} bytes; "
            f"MAX_ANSWER_BYTES allows {cap} tokens here. Ask for a stream",
        )
    return max_tokens


def _within_budget(
    max_tokens: int | None, plan: Plan, settings: Settings, *, is_arrow: bool, is_stream: bool
) -> int:
    """Return how many rows may come; where the request names no number, the cap is the limit."""
    vocab_size = plan.info.vocab_size
    row_bytes = {
        "b64_fp16": vocab_size * 8 // 3,
        "b64_fp32": vocab_size * 16 // 3,
        "json": vocab_size * JSON_BYTES_PER_VALUE,
    }[plan.encoding]
    cap, name = settings.max_logit_tokens, "MAX_LOGIT_TOKENS"
    if is_arrow:
        row_bytes = vocab_size * (2 if plan.row_dtype is RowDtype.FLOAT16 else 4)
    elif not is_stream and settings.max_answer_bytes // row_bytes < cap:
        cap, name = max(settings.max_answer_bytes // row_bytes, 1), "MAX_ANSWER_BYTES"
    # Without rows of generated tokens, only those of the prompts count.
    per_token = plan.num_choices if plan.wants_rows else 0
    if max_tokens is None:
        room = plan.info.max_model_len - max(map(len, plan.prompts))
        left = (cap - plan.num_prompt_rows) // per_token if per_token else room
        # With no room at all the engine refuses the prompt, and says why.
        max_tokens = min(max(left, 1), max(room, 1))
    num_rows = per_token * max_tokens + plan.num_prompt_rows
    if num_rows > cap:
        raise ServiceError(
            "logit_budget_exceeded",
            f"{num_rows} rows would take {num_rows * row_bytes:,} bytes; {name} allows {cap} rows here. "
            + ("Lower max_tokens or n" if name == "MAX_LOGIT_TOKENS" else "Ask for a stream"),
        )
    return max_tokens
