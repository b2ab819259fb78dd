"""Where wire and engine types meet: requests one way, answers the other way.

Nothing else in the service builds an engine request or reads an engine event.
"""

import hashlib
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from engine.errors import ContextLengthError
from engine.grammar import Grammar
from engine.tokenizer import Tokenizer
from engine.types import (
    Finish,
    GenerationRequest,
    ModelInfo,
    RowDtype,
    SamplingParams,
    TokenEvent,
    TokenStats,
    TopLogprobs,
)
from schemas.chat import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatMessage,
    ChatRequest,
    ChoiceLogprobs,
    TokenLogprob,
    TopLogprob,
)
from schemas.logits import (
    LogitsEncoding,
    Metadata,
    PromptTokensDetails,
    TokenStatsBlock,
    Usage,
)
from service.errors import Problem, ProblemsError, ServiceError
from service.negotiate import Representation
from service.settings import Settings
from service.structured import read_response_format

MIN_LOGPROB = -9999.0
"""What OpenAI's clients get for a probability of zero, since JSON has no infinity."""

SELECTED_BYTES_PER_VALUE = 40
"""Of a selected logit while it is held: a Python float and its place in a list."""

JSON_BYTES_PER_VALUE = 12
"""Of a logit as decimal text, roughly; only for estimates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What an answer is to hold, and what stands in all of its parts."""

    id: str
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
    prompt_token_ids: tuple[int, ...]
    wants_stats: bool = False
    logit_token_ids: tuple[int, ...] = ()
    num_choices: int = 1
    wants_prompt_rows: bool = False

    @property
    def row_dtype(self) -> RowDtype | None:
        """The dtype in which whole rows leave the engine, if any do."""
        if not (self.wants_rows or self.wants_prompt_rows):
            return None
        return RowDtype.FLOAT16 if self.encoding == "b64_fp16" else RowDtype.FLOAT32

    @property
    def num_prompt_rows(self) -> int:
        """Rows of the prompt that the answer holds."""
        return len(self.prompt_token_ids) - 1 if self.wants_prompt_rows else 0

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


# Requests.

# Fields that later versions support; today each may only have a value that asks for nothing.
_NEUTRAL: dict[str, Callable[[Any], bool]] = {
    "frequency_penalty": lambda value: value == 0,
    "presence_penalty": lambda value: value == 0,
    "logit_bias": lambda value: not value,
    "tools": lambda value: not value,
    "tool_choice": lambda value: value in ("none", "auto"),
    "return_tokens_as_token_ids": lambda value: not value,
    "min_tokens": lambda value: value == 0,
    "include_stop_str_in_output": lambda value: not value,
    "chat_template": lambda value: False,
    "include_reasoning": lambda value: value,
    "priority": lambda value: value == 0,
}


def check_chat(request: ChatRequest, form: Representation, settings: Settings) -> None:
    """Refuse what is not supported, and combinations that contradict each other.

    Raises:
        ProblemsError: With every problem found.
    """
    problems = [
        Problem("unsupported_parameter", "this value is not supported yet", name)
        for name, is_neutral in _NEUTRAL.items()
        if (value := getattr(request, name)) is not None and not is_neutral(value)
    ]
    if (request.n or 1) > settings.max_queue:
        problems.append(
            Problem("invalid_value", f"each choice waits in the queue, which holds {settings.max_queue}", "n")
        )
    if request.stream and form is Representation.JSON:
        problems.append(
            Problem(
                "unsupported_parameter", "streaming is served as Arrow only; ask for it by Accept", "stream"
            )
        )
    if request.top_logprobs and not _wants_entries(request):
        problems.append(Problem("invalid_value", "needs logprobs: true", "top_logprobs"))
    if request.return_prompt_logits and request.logit_token_ids:
        problems.append(
            Problem(
                "unsupported_parameter", "is not supported beside logit_token_ids", "return_prompt_logits"
            )
        )
    if request.do_sample and request.temperature == 0:
        problems.append(Problem("invalid_value", "contradicts temperature 0, which is greedy", "do_sample"))
    if request.add_generation_prompt and request.continue_final_message:
        problems.append(
            Problem("invalid_value", "contradicts add_generation_prompt: true", "continue_final_message")
        )
    if form is Representation.ARROW and request.logits_encoding == "json":
        problems.append(
            Problem("invalid_value", "an Arrow answer holds b64_fp16 or b64_fp32 rows", "logits_encoding")
        )
    problems += _message_problems(request.messages)
    problems += read_response_format(
        request.response_format, ignore_unknown=settings.unknown_fields == "ignore"
    )[1]
    if problems:
        raise ProblemsError(problems)


def _message_problems(messages: Sequence[ChatMessage]) -> list[Problem]:
    problems = []
    for place, message in enumerate(messages):
        path = f"messages[{place}].content"
        if message.content is None and message.role != "assistant":
            problems.append(Problem("invalid_value", "only an assistant's content may be null", path))
        for part_place, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if part.type != "text":
                problems.append(
                    Problem(
                        "invalid_value",
                        f"parts of type {part.type[:50]} are not supported",
                        f"{path}[{part_place}].type",
                    )
                )
            elif part.text is None:
                problems.append(
                    Problem("invalid_value", "a text part needs a text", f"{path}[{part_place}].text")
                )
    return problems


def _wants_entries(request: ChatRequest) -> bool:
    """Tell whether the JSON answer holds logprobs entries."""
    return bool(request.return_logprobs) if request.logprobs is None else request.logprobs


def chat_prompt(request: ChatRequest, tokenizer: Tokenizer, max_model_len: int) -> list[int]:
    """Return the prompt's ids. Takes long for long prompts: not for the event loop.

    Raises:
        InvalidRequestError: The chat template refuses the messages.
        ContextLengthError: The text cannot fit the context, however well it is tokenised.
    """
    messages = [_template_message(message) for message in request.messages]
    template_kwargs = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        template_kwargs["reasoning_effort"] = request.reasoning_effort
    continues = bool(request.continue_final_message)
    prompts = not continues if request.add_generation_prompt is None else request.add_generation_prompt
    text = tokenizer.render_chat(
        messages,
        add_generation_prompt=prompts,
        continue_final_message=continues,
        template_kwargs=template_kwargs,
    )
    # Tokenising megabytes only to refuse them would take minutes and gigabytes.
    least = -(-len(text) // tokenizer.max_token_length)
    if least > max_model_len:
        raise ContextLengthError(least, request.max_tokens, max_model_len)
    return tokenizer.encode(text)


def _template_message(message: ChatMessage) -> dict[str, Any]:
    """Return a message as templates know it: content is one string, text parts joined by line ends."""
    content = message.content
    if content is None:
        content = ""
    elif not isinstance(content, str):
        content = "\n".join(part.text or "" for part in content)
    rendered: dict[str, Any] = {"role": message.role, "content": content}
    for name in ("name", "tool_calls", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            rendered[name] = value
    return rendered


def plan_chat(
    request: ChatRequest,
    form: Representation,
    prompt_token_ids: Sequence[int],
    info: ModelInfo,
    settings: Settings,
    *,
    grammar: Grammar | None = None,
) -> tuple[Plan, list[GenerationRequest]]:
    """Return what to answer, and what to generate: one engine request per choice.

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
    temperature = 1.0 if request.temperature is None else request.temperature
    if request.do_sample is False:
        temperature = 0.0
    sampling = SamplingParams(
        temperature=temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=max(request.top_k or 0, 0),
        min_p=request.min_p or 0.0,
        repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
    )
    wants_entries = _wants_entries(request)
    plan = Plan(
        id=f"chatcmpl-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=settings.served_model_name or info.name,
        info=info,
        encoding=request.logits_encoding or "b64_fp16",
        wants_rows=wants_rows,
        wants_entries=wants_entries,
        num_top_logprobs=(request.top_logprobs or 0) if wants_entries else 0,
        wants_token_ids=wants_rows
        or wants_prompt_rows
        or bool(request.return_logits)
        or bool(request.return_token_ids),
        wants_stats=bool(request.token_stats),
        logit_token_ids=logit_token_ids,
        do_sample=temperature > 0,
        arrow_compression=request.arrow_compression,
        prompt_token_ids=tuple(prompt_token_ids),
        num_choices=request.n or 1,
        wants_prompt_rows=wants_prompt_rows,
    )
    max_tokens = (
        request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    )
    held_bytes = 0
    if plan.row_dtype is not None:
        max_tokens = _within_budget(max_tokens, plan, settings, is_arrow=is_arrow)
        # A JSON answer keeps all its rows; an Arrow stream has some in its outbox only.
        row_bytes = info.vocab_size * np.dtype(plan.row_dtype.value).itemsize
        held_bytes = (max_tokens * wants_rows + plan.num_prompt_rows) * row_bytes
    elif logit_token_ids:
        max_tokens = _within_column_budget(max_tokens, plan, settings, is_arrow=is_arrow)
        held_bytes = max_tokens * len(logit_token_ids) * SELECTED_BYTES_PER_VALUE
    if held_bytes:
        if is_arrow:
            held_bytes = min(held_bytes, settings.outbox_bytes)
        # The choices of one request must fit beside each other, or they would wait for each other for ever.
        held_bytes = min(held_bytes, settings.row_budget_bytes // plan.num_choices)
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    first = GenerationRequest(
        request_id=f"{plan.id}-0",
        prompt_token_ids=plan.prompt_token_ids,
        max_tokens=max_tokens,
        sampling=sampling,
        seed=request.seed,
        stop=tuple(stop),
        stop_token_ids=frozenset(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        skip_special_tokens=request.skip_special_tokens is not False,
        row_dtype=plan.row_dtype if wants_rows else None,
        logprobs=wants_entries or is_arrow,
        num_top_logprobs=plan.num_top_logprobs,
        token_stats=plan.wants_stats,
        logit_token_ids=logit_token_ids,
        held_bytes=held_bytes,
        grammar=grammar,
    )
    return plan, [
        replace(
            first,
            request_id=f"{plan.id}-{choice}",
            seed=choice_seed(request.seed, choice),
            prompt_row_dtype=plan.row_dtype if wants_prompt_rows and choice == 0 else None,
        )
        for choice in range(plan.num_choices)
    ]


def _within_column_budget(max_tokens: int | None, plan: Plan, settings: Settings, *, is_arrow: bool) -> int:
    """Return how many tokens may come whose selected columns one JSON answer holds."""
    room = max(plan.info.max_model_len - len(plan.prompt_token_ids), 1)
    token_bytes = plan.num_choices * len(plan.logit_token_ids) * JSON_BYTES_PER_VALUE
    cap = max(settings.max_answer_bytes // token_bytes, 1)
    if max_tokens is None:
        return room if is_arrow else min(cap, room)
    if max_tokens > cap and not is_arrow:
        raise ServiceError(
            "logit_budget_exceeded",
            f"the selected columns of {max_tokens} tokens would take {max_tokens * token_bytes:,} bytes; "
            f"MAX_ANSWER_BYTES allows {cap} tokens here. Ask for an Arrow stream",
            "max_tokens",
        )
    return max_tokens


def choice_seed(seed: int | None, choice: int) -> int | None:
    """Return the seed of one of several choices: a stream of its own, but the same each time."""
    if seed is None or choice == 0:
        return seed
    digest = hashlib.blake2b(f"{seed} {choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _within_budget(max_tokens: int | None, plan: Plan, settings: Settings, *, is_arrow: bool) -> int:
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
    elif settings.max_answer_bytes // row_bytes < cap:
        cap, name = max(settings.max_answer_bytes // row_bytes, 1), "MAX_ANSWER_BYTES"
    num_choices = plan.num_choices
    # Without rows of generated tokens, only those of the prompt count.
    per_token = num_choices if plan.wants_rows else 0
    if max_tokens is None:
        room = plan.info.max_model_len - len(plan.prompt_token_ids)
        left = (cap - plan.num_prompt_rows) // per_token if per_token else room
        # With no room at all the engine refuses the prompt, and says why.
        max_tokens = min(max(left, 1), max(room, 1))
    num_rows = per_token * max_tokens + plan.num_prompt_rows
    if num_rows > cap:
        raise ServiceError(
            "logit_budget_exceeded",
            f"{num_rows} rows would take {num_rows * row_bytes:,} bytes; {name} allows {cap} rows here. "
            + ("Lower max_tokens or n" if name == "MAX_LOGIT_TOKENS" else "Ask for an Arrow stream"),
            "max_tokens",
        )
    return max_tokens


# Answers.


@dataclass(slots=True)
class Choice:
    """Gathers the events of one completion.

    Attributes:
        rows, stats, selected: One per token, for a JSON answer; an Arrow answer sends them on and keeps none.
    """

    index: int
    plan: Plan
    tokenizer: Tokenizer
    keeps_rows: bool
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    entries: list[TokenLogprob] = field(default_factory=list)
    rows: list[NDArray[np.floating]] = field(default_factory=list)
    prompt_rows: list[NDArray[np.floating]] = field(default_factory=list)
    stats: list[TokenStats] = field(default_factory=list)
    selected: list[list[float | None]] = field(default_factory=list)
    finish: Finish | None = None
    num_rows: int = 0
    num_row_bytes: int = 0

    def add(self, events: Sequence[TokenEvent | Finish]) -> None:
        """Take events in their order."""
        for event in events:
            if isinstance(event, Finish):
                self.finish = event
                continue
            self.num_rows += event.row is not None
            self.num_row_bytes += event.num_bytes
            if event.is_prompt:
                if self.keeps_rows and event.row is not None:
                    self.prompt_rows.append(event.row)
                continue
            self.text.append(event.text)
            self.token_ids.append(event.token_id)
            if self.plan.wants_entries:
                self.entries.append(self._entry(event))
            if not self.keeps_rows:
                continue
            if event.row is not None:
                self.rows.append(event.row)
            if event.stats is not None:
                self.stats.append(event.stats)
            if event.selected is not None:
                self.selected.append(event.selected.tolist())

    def _entry(self, event: TokenEvent) -> TokenLogprob:
        assert event.logprob is not None
        alternatives = event.top_logprobs or TopLogprobs([], [])
        return TokenLogprob(
            token=self.tokenizer.token_text(event.token_id),
            logprob=max(event.logprob, MIN_LOGPROB),
            bytes=list(self.tokenizer.token_bytes(event.token_id)),
            top_logprobs=[
                TopLogprob(
                    token=self.tokenizer.token_text(token_id),
                    logprob=max(logprob, MIN_LOGPROB),
                    bytes=list(self.tokenizer.token_bytes(token_id)),
                )
                for token_id, logprob in zip(alternatives.token_ids, alternatives.logprobs, strict=True)
            ],
        )

    def wire(self) -> ChatChoice:
        """Return the choice without its rows."""
        assert self.finish is not None
        plan = self.plan
        return ChatChoice(
            index=self.index,
            message=AssistantMessage(content="".join(self.text)),
            logprobs=ChoiceLogprobs(content=self.entries) if plan.wants_entries else None,
            finish_reason=self.finish.reason.value,
            stop_reason=self.finish.stop_reason,
            token_ids=self.token_ids if plan.wants_token_ids else UNSET,
            token_stats=self._stats() if plan.wants_stats and self.keeps_rows else UNSET,
        )

    def _stats(self) -> TokenStatsBlock:
        return TokenStatsBlock(
            entropy=[each.entropy for each in self.stats],
            logsumexp=[each.logsumexp for each in self.stats],
            rank=[each.rank for each in self.stats],
            margin=[each.margin for each in self.stats],
        )


def chat_completion(
    plan: Plan, choices: Sequence[Choice], *, num_rows: Sequence[int] | None = None
) -> ChatCompletion:
    """Return the whole answer, without the rows themselves.

    Args:
        plan: Of the answer.
        choices: All of them, ended.
        num_rows: Rows per choice, for Arrow's end record.
    """
    num_prompt, num_completion = len(plan.prompt_token_ids), sum(len(each.token_ids) for each in choices)
    first = choices[0].finish
    assert first is not None
    return ChatCompletion(
        id=plan.id,
        created=plan.created,
        model=plan.model,
        choices=[each.wire() for each in choices],
        usage=Usage(
            prompt_tokens=num_prompt,
            completion_tokens=num_completion,
            total_tokens=num_prompt + num_completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=first.num_cached),
        ),
        metadata=plan.metadata(first.stop_reason if isinstance(first.stop_reason, str) else None),
        prompt_token_ids=list(plan.prompt_token_ids) if plan.wants_token_ids else UNSET,
        rows=UNSET if num_rows is None else list(num_rows),
    )
