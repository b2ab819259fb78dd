"""Given tokens: sequences of a request to ids, ranges and engine requests; events to the answer."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from msgspec import UNSET

from engine.errors import ContextLengthError, InvalidRequestError
from engine.no_tokenizer import WHY
from engine.scoring import held_bytes
from engine.tokenizer import Tokenizer
from engine.types import TOP_BYTES, GenerationRequest, ModelInfo, RowDtype
from schemas.chat import ChatRequest
from schemas.logits import PromptTokensDetails, Usage
from schemas.scoring import Context, GivenSequence, LogitsAnswer, LogitsData, LogitsRequest
from service.convert.chat import chat_prompt, message_problems
from service.convert.choice import Choice
from service.convert.completions import start_token
from service.convert.plan import ID_PREFIXES, JSON_BYTES_PER_VALUE, Plan
from service.errors import Problem, ProblemsError, ServiceError
from service.negotiate import Representation
from service.settings import Settings


@dataclass(frozen=True, slots=True)
class Given:
    """Tokens of one sequence.

    Attributes:
        prompt_length: How many of them are context; ``None`` if nobody said.
        start: The first one whose row is wanted.
        num_rows: Rows from there on, the one behind the last token included if it is wanted.
    """

    token_ids: tuple[int, ...]
    prompt_length: int | None
    start: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class ScoringPlan:
    """What an answer of rows for given tokens is to hold.

    Attributes:
        plan: What it has in common with other answers; its prompts are the sequences.
        columns: For each sequence the ids of each row's columns, if they differ.
    """

    plan: Plan
    sequences: tuple[Given, ...]
    columns: tuple[tuple[tuple[int, ...], ...], ...]


def context_problems(context: Context, path: str) -> list[Problem]:
    """Return what is wrong with tokens in one of three forms."""
    forms = [name for name in ("token_ids", "text", "messages") if getattr(context, name) is not None]
    if len(forms) != 1:
        return [Problem("invalid_value", "needs exactly one of token_ids, text and messages", path)]
    if context.token_ids is not None and not context.token_ids:
        return [Problem("invalid_value", "must not be empty", f"{path}.token_ids")]
    return [
        replace(problem, param=f"{path}.{problem.param}")
        for problem in message_problems(context.messages or ())
    ]


def context_ids(
    context: Context, path: str, tokenizer: Tokenizer, info: ModelInfo, settings: Settings
) -> list[int]:
    """Return the ids of a context. Takes long for long ones: not for the event loop.

    Raises:
        ProblemsError: An id is not in the vocabulary, or an empty text has no start token to stand for it.
        ContextLengthError: A text cannot fit the context, however well it is tokenised.
        InvalidRequestError: The chat template refuses the messages.
    """
    if context.token_ids is not None:
        for place, token_id in enumerate(context.token_ids):
            if token_id >= info.vocab_size:
                message = f"token id {token_id} is not in 0..{info.vocab_size - 1}"
                raise ProblemsError([Problem("invalid_value", message, f"{path}.token_ids[{place}]")])
        return context.token_ids
    needs_text(tokenizer, f"{path}.{'messages' if context.text is None else 'text'}")
    if context.text is not None:
        check_length(context.text, tokenizer, info)
        ids = tokenizer.encode(context.text, add_special_tokens=True)
        return ids or [start_token(tokenizer, f"{path}.text")]
    assert context.messages is not None
    request = ChatRequest(messages=context.messages)
    try:
        return chat_prompt(request, tokenizer, info.max_model_len, settings).token_ids
    except InvalidRequestError as error:
        raise InvalidRequestError(str(error), f"{path}.{error.param}") from error


def needs_text(tokenizer: Tokenizer, path: str) -> None:
    """Refuse a text on a server that works on ids only.

    Raises:
        ProblemsError: ``unsupported_parameter``, with the path of the text.
    """
    if not tokenizer.has_text:
        raise ProblemsError([Problem("unsupported_parameter", WHY, path)])


def check_length(text: str, tokenizer: Tokenizer, info: ModelInfo) -> None:
    """Refuse a text that cannot fit the context, before it is tokenised.

    Raises:
        ContextLengthError: It cannot, however well it is tokenised.
    """
    least = -(-len(text) // tokenizer.max_token_length)
    if least > info.max_model_len:
        raise ContextLengthError(least, None, info.max_model_len)


# Requests.


def check_logits(request: LogitsRequest, form: Representation, info: ModelInfo, settings: Settings) -> None:
    """Refuse combinations that contradict each other.

    Raises:
        ProblemsError: With every problem found.
    """
    problems = []
    if form is Representation.ARROW and request.logits_encoding == "json":
        problems.append(
            Problem("invalid_value", "an Arrow answer holds b64_fp16 or b64_fp32 rows", "logits_encoding")
        )
    if (request.top_logprobs or 0) > info.vocab_size:
        problems.append(Problem("invalid_value", f"a row has {info.vocab_size} values", "top_logprobs"))
    if len(request.sequences) > settings.max_queue:
        message = f"each sequence waits in the queue, which holds {settings.max_queue}"
        problems.append(Problem("invalid_value", message, "sequences"))
    for place, sequence in enumerate(request.sequences):
        path = f"sequences[{place}]"
        problems += context_problems(sequence, path)
        if sequence.completion is not None and sequence.messages is None:
            problems.append(Problem("invalid_value", "needs messages", f"{path}.completion"))
        is_unknown = sequence.messages is None and sequence.prompt_length is None
        if request.range == "completion" and is_unknown:
            problems.append(Problem("invalid_value", "range completion needs it", f"{path}.prompt_length"))
    if problems:
        raise ProblemsError(problems)


def given_sequences(
    request: LogitsRequest, tokenizer: Tokenizer, info: ModelInfo, settings: Settings
) -> list[Given]:
    """Return the tokens of each sequence, and whose rows are wanted. Not for the event loop.

    Raises:
        ProblemsError: An id is not in the vocabulary, or a prompt length does not fit its tokens.
        ContextLengthError: A sequence does not fit the context.
        InvalidRequestError: The chat template refuses messages.
    """
    return [
        _given(sequence, f"sequences[{place}]", request, tokenizer, info, settings)
        for place, sequence in enumerate(request.sequences)
    ]


def _given(  # noqa: PLR0917 - all of them are needed to read a sequence
    sequence: GivenSequence,
    path: str,
    request: LogitsRequest,
    tokenizer: Tokenizer,
    info: ModelInfo,
    settings: Settings,
) -> Given:
    ids = context_ids(sequence, path, tokenizer, info, settings)
    prompt_length = sequence.prompt_length
    if sequence.messages is not None:
        completion = sequence.completion or ""
        check_length(completion, tokenizer, info)
        known = len(ids)
        if prompt_length not in (None, known):
            message = f"the messages have {known} tokens"
            raise ProblemsError([Problem("invalid_value", message, f"{path}.prompt_length")])
        prompt_length = known
        ids = [*ids, *tokenizer.encode_continuation(ids, completion)]
    if prompt_length is not None and prompt_length > len(ids):
        message = f"the sequence has {len(ids)} tokens"
        raise ProblemsError([Problem("invalid_value", message, f"{path}.prompt_length")])
    if len(ids) > info.max_model_len:
        raise ContextLengthError(len(ids), None, info.max_model_len)
    start = 1 if request.range == "all" or prompt_length is None else max(1, prompt_length)
    return Given(tuple(ids), prompt_length, start, len(ids) - start + bool(request.next_token))


def _columns(
    raw: Sequence[Any], sequences: Sequence[Given], vocab_size: int
) -> tuple[tuple[int, ...], tuple[tuple[tuple[int, ...], ...], ...]]:
    """Return the columns of all rows, or those of each row of each sequence.

    Raises:
        ProblemsError: The value has neither form, or an id is not in the vocabulary.
    """
    name = "logit_token_ids"
    if not any(isinstance(each, list) for each in raw):
        return _ids(raw, name, vocab_size), ()
    if len(raw) != len(sequences):
        message = f"has lists for {len(raw)} sequences, and there are {len(sequences)}"
        raise ProblemsError([Problem("invalid_value", message, name)])
    found = []
    for place, (lists, given) in enumerate(zip(raw, sequences, strict=True)):
        path = f"{name}[{place}]"
        if not isinstance(lists, list) or len(lists) != given.num_rows:
            message = f"expected a list of ids for each of the sequence's {given.num_rows} positions"
            raise ProblemsError([Problem("invalid_value", message, path)])
        found.append(tuple(_ids(each, f"{path}[{row}]", vocab_size) for row, each in enumerate(lists)))
    return (), tuple(found)


def _ids(values: Any, path: str, vocab_size: int) -> tuple[int, ...]:
    if not isinstance(values, list):
        raise ProblemsError([Problem("invalid_value", "expected a list of token ids", path)])
    if len(values) > vocab_size:
        message = f"there are only {vocab_size} different token ids"
        raise ProblemsError([Problem("invalid_value", message, path)])
    for place, each in enumerate(values):
        if type(each) is not int or not 0 <= each < vocab_size:
            message = f"expected a token id in 0..{vocab_size - 1}"
            raise ProblemsError([Problem("invalid_value", message, f"{path}[{place}]")])
    return tuple(values)


def plan_logits(
    request: LogitsRequest,
    form: Representation,
    sequences: Sequence[Given],
    info: ModelInfo,
    settings: Settings,
) -> tuple[ScoringPlan, list[GenerationRequest]]:
    """Return what to answer, and what to run: one engine request per sequence.

    Raises:
        ProblemsError: The columns asked for do not fit the rows.
        ServiceError: ``logit_budget_exceeded``.
    """
    shared, ragged = _columns(request.logit_token_ids or [], sequences, info.vocab_size)
    wants_rows = request.return_logits is not False and not (shared or ragged)
    num_top = info.vocab_size if request.top_logprobs == -1 else request.top_logprobs or 0
    plan = new_plan(
        "logits",
        [each.token_ids for each in sequences],
        info,
        settings,
        encoding=request.logits_encoding or "b64_fp16",
        num_top_logprobs=num_top,
        arrow_compression=request.arrow_compression,
        wants_stats=bool(request.token_stats),
        logit_token_ids=shared,
        wants_prompt_rows=wants_rows,
    )
    scoring = ScoringPlan(plan, tuple(sequences), ragged)
    is_arrow = form is Representation.ARROW
    _check_budget(scoring, settings, is_arrow=is_arrow)
    requests = []
    for place, given in enumerate(sequences):
        asked = GenerationRequest(
            request_id=f"{plan.id}-{place}",
            prompt_token_ids=given.token_ids,
            max_tokens=0,
            num_prompt_top_logprobs=num_top,
            token_stats=plan.wants_stats,
            logit_token_ids=shared,
            prompt_row_dtype=plan.row_dtype,
            prompt_logprobs=True,
            prompt_start=given.start,
            prompt_columns=ragged[place] if ragged else (),
            next_row=bool(request.next_token),
            priority=request.priority or 0,
        )
        held = given.num_rows * held_bytes(asked, info.vocab_size)
        if is_arrow:
            held = min(held, settings.outbox_bytes)
        # The sequences of one request must fit beside each other, or they would wait for each other for ever.
        requests.append(replace(asked, held_bytes=min(held, settings.row_budget_bytes // len(sequences))))
    return scoring, requests


def new_plan(
    kind: Any, prompts: Sequence[tuple[int, ...]], info: ModelInfo, settings: Settings, **fields: Any
) -> Plan:
    """Return the plan of an answer to given tokens: nothing is generated unless fields say so."""
    values = {
        "encoding": "b64_fp16",
        "wants_rows": False,
        "wants_entries": False,
        "num_top_logprobs": 0,
        "wants_token_ids": True,
        "do_sample": False,
        "arrow_compression": None,
        **fields,
    }
    return Plan(
        id=f"{ID_PREFIXES[kind]}-{uuid.uuid4().hex}",
        object=kind,
        created=int(time.time()),
        model=settings.served_model_name or info.name,
        info=info,
        prompts=tuple(prompts),
        **values,
    )


def _check_budget(scoring: ScoringPlan, settings: Settings, *, is_arrow: bool) -> None:
    """Refuse more rows than one request may have, and a JSON answer that would be too large."""
    plan, vocab_size = scoring.plan, scoring.plan.info.vocab_size
    num_rows = sum(each.num_rows for each in scoring.sequences)
    row_bytes = 0
    if plan.row_dtype is not None:
        json_bytes = {"b64_fp16": 8 / 3, "b64_fp32": 16 / 3, "json": JSON_BYTES_PER_VALUE}[plan.encoding]
        arrow_bytes = 2 if plan.row_dtype is RowDtype.FLOAT16 else 4
        row_bytes = int(vocab_size * (arrow_bytes if is_arrow else json_bytes))
    if plan.row_dtype is not None and num_rows > settings.max_logit_tokens:
        raise ServiceError(
            "logit_budget_exceeded",
            f"{num_rows} rows would take {num_rows * row_bytes:,} bytes; MAX_LOGIT_TOKENS allows "
            f"{settings.max_logit_tokens} rows. Narrow the range, or ask for logit_token_ids",
            "sequences",
        )
    num_columns = num_rows * len(plan.logit_token_ids) + sum(
        len(ids) for rows in scoring.columns for ids in rows
    )
    num_bytes = (
        num_rows * (row_bytes + TOP_BYTES * plan.num_top_logprobs) + num_columns * JSON_BYTES_PER_VALUE
    )
    if not is_arrow and num_bytes > settings.max_answer_bytes:
        raise ServiceError(
            "logit_budget_exceeded",
            f"the numbers of {num_rows} rows would take {num_bytes:,} bytes; MAX_ANSWER_BYTES allows "
            f"{settings.max_answer_bytes:,}. Ask for an Arrow stream",
            "sequences",
        )


# Answers.


def logits_answer(
    scoring: ScoringPlan,
    choices: Sequence[Choice],
    *,
    parts: Sequence[dict[str, Any]] = (),
    num_rows: Sequence[int] | None = None,
) -> LogitsAnswer:
    """Return the whole answer.

    Args:
        scoring: Its plan.
        choices: One per sequence, all of them ended.
        parts: Further fields of each sequence.
        num_rows: Rows per sequence, for Arrow's end record.
    """
    plan = scoring.plan
    data = [
        LogitsData(
            index=place,
            token_ids=list(given.token_ids),
            positions=list(range(given.start, given.start + given.num_rows)),
            **(parts[place] if parts else {}),
        )
        for place, given in enumerate(scoring.sequences)
    ]
    return LogitsAnswer(
        model=plan.model,
        created=plan.created,
        data=data,
        usage=usage_of(plan.num_prompt_tokens, 0, choices),
        metadata=plan.metadata(),
        rows=UNSET if num_rows is None else list(num_rows),
    )


def usage_of(num_prompt: int, num_completion: int, choices: Sequence[Choice]) -> Usage:
    """Return the counts of an answer."""
    num_cached = sum(each.finish.num_cached for each in choices if each.finish is not None)
    return Usage(
        prompt_tokens=num_prompt,
        completion_tokens=num_completion,
        total_tokens=num_prompt + num_completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=num_cached),
    )
