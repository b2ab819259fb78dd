"""From a method's arguments to a request, and from its answer to a result; the same for threads and loops."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from logitwire.arrow import Batch, Table
from logitwire.errors import IncompleteStreamError
from logitwire.options import Context, LogitsDtype
from logitwire.results import (
    DIVERGENCE_COLUMNS,
    Columns,
    Divergence,
    Generation,
    Received,
    Row,
    Score,
)

Result = TypeVar("Result")

ENCODINGS = {"float16": "b64_fp16", "float32": "b64_fp32"}

NAMED_COLUMNS = frozenset(
    ("choice", "position", "segment", "token_id", "token", "token_bytes", "logprob", "finish_reason")
)


@dataclass(frozen=True, slots=True)
class RowsCall(Generic[Result]):
    """A request that is answered with an Arrow stream.

    Attributes:
        path: Of the route.
        body: JSON.
        max_rows_of: For each choice how many rows may come, if that is known here.
        result: Makes the result.
    """

    path: str
    body: bytes
    max_rows_of: Sequence[int | None]
    result: Callable[[Table], Result]


@dataclass(frozen=True, slots=True)
class JsonCall(Generic[Result]):
    """A request that is answered with JSON."""

    path: str
    body: bytes
    result: Callable[[Any], Result]


def chat(
    messages: Sequence[Mapping[str, Any]], logits: LogitsDtype | None, options: Mapping[str, Any]
) -> RowsCall[Generation]:
    """Return the call that continues a conversation.

    Raises:
        ValueError: ``logits`` is none of its values.
    """
    limit = _first(options, "max_completion_tokens", "max_tokens")
    body = {"messages": messages, "return_token_ids": True, **_rows_fields(logits), **options}
    return _generation_call("/v1/chat/completions", body, 1, limit)


def complete(
    prompt: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
    logits: LogitsDtype | None,
    options: Mapping[str, Any],
) -> RowsCall[Generation]:
    """Return the call that continues texts or ids.

    Raises:
        ValueError: ``logits`` is none of its values.
    """
    has_many = not isinstance(prompt, str) and len(prompt) > 0 and not isinstance(prompt[0], int | np.integer)
    body = {"prompt": prompt, "return_token_ids": True, **_rows_fields(logits), **options}
    limit = _first(options, "max_tokens")
    return _generation_call("/v1/completions", body, len(prompt) if has_many else 1, limit)


def generate(
    token_ids: Sequence[int], logits: LogitsDtype | None, options: Mapping[str, Any]
) -> RowsCall[Generation]:
    """Return the call that continues ids, in vLLM's shape.

    Raises:
        ValueError: ``logits`` is none of its values.
    """
    body = {"token_ids": token_ids, "return_token_ids": True, **_rows_fields(logits), **options}
    nested = options.get("sampling_params") or {}
    limit = _first(options, "max_tokens") or _first(nested, "max_tokens")
    return _generation_call("/inference/v1/generate", body, 1, limit, n=nested.get("n"))


def score(
    sequences: Sequence[Context], logits: LogitsDtype | None, options: Mapping[str, Any]
) -> RowsCall[list[Score]]:
    """Return the call that scores given tokens.

    Raises:
        ValueError: ``logits`` is none of its values.
        TypeError: ``sequences`` is a single text.
    """
    if isinstance(sequences, str | Mapping):
        raise TypeError("sequences is a list; put one sequence into a list of its own")
    given = [_context(each) for each in sequences]
    return RowsCall(
        "/v1/logits",
        _encode({"sequences": given, **_rows_fields(logits), **options}),
        [_max_scored(each, options) for each in given],
        _scores,
    )


def divergence(
    p: Context,
    q: Context,
    completion: str | Sequence[int] | Mapping[str, Any] | None,
    options: Mapping[str, Any],
) -> JsonCall[Divergence]:
    """Return the call that compares two contexts."""
    if completion is not None and not isinstance(completion, str | Mapping):
        completion = {"token_ids": completion}
    body = {"p": _context(p), "q": _context(q), "completion": completion, **options}
    return JsonCall("/v1/divergence", _encode(body), _divergence)


def rows_of(batch: Batch) -> list[Row]:
    """Return the rows of a batch, one by one.

    Raises:
        IncompleteStreamError: The batch lacks columns of the wire.
    """
    columns = batch.columns
    if missing := NAMED_COLUMNS - columns.keys():
        raise IncompleteStreamError(f"the stream has no columns {', '.join(sorted(missing))}")
    num = len(columns["choice"])
    logits: Sequence[Any] = [None] * num
    if batch.places is not None:
        logits = [row for place in batch.places for row in place]
        for row in logits:
            row.flags.writeable = False
    others = {name: values for name, values in columns.items() if name not in NAMED_COLUMNS}
    return [
        Row(
            choice=columns["choice"][at],
            position=columns["position"][at],
            segment=columns["segment"][at],
            token_id=columns["token_id"][at],
            token=columns["token"][at],
            token_bytes=columns["token_bytes"][at],
            logprob=columns["logprob"][at],
            logits=logits[at],
            columns={name: values[at] for name, values in others.items()},
            finish_reason=columns["finish_reason"][at],
        )
        for at in range(num)
    ]


def _rows_fields(logits: LogitsDtype | None) -> dict[str, Any]:
    if logits not in (None, *ENCODINGS):
        raise ValueError(f"logits must be 'float16', 'float32' or None, not {logits!r}")
    return {"return_logits": logits is not None, "logits_encoding": ENCODINGS[logits or "float16"]}


def _encode(body: Mapping[str, Any]) -> bytes:
    """Return a body as JSON, without the fields that are left to the server."""
    sent = {name: value for name, value in body.items() if value is not None}
    return msgspec.json.encode(sent, enc_hook=_as_plain)


def _as_plain(value: Any) -> Any:
    """Return numpy's arrays and numbers, and other sequences and mappings, as JSON knows them."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"a {type(value).__name__} cannot be sent")


def _context(given: Context) -> Mapping[str, Any]:
    """Return the wire's object of a text, ids or a conversation."""
    if isinstance(given, Mapping):
        return given
    if isinstance(given, str):
        return {"text": given}
    is_conversation = len(given) > 0 and isinstance(given[0], Mapping)
    return {"messages" if is_conversation else "token_ids": given}


def _first(options: Mapping[str, Any], *names: str) -> int | None:
    """Return the first of some fields that is there; what is wrong with it, the server says."""
    value = next((options[name] for name in names if options.get(name) is not None), None)
    return value if isinstance(value, int) and value >= 0 else None


def _generation_call(
    path: str, body: Mapping[str, Any], num_prompts: int, limit: int | None, n: Any = None
) -> RowsCall[Generation]:
    """Return a call with ``n`` completions of each prompt, each of ``limit`` tokens at most."""
    n = body.get("n") or n
    num_choices = num_prompts * (n if isinstance(n, int) and n > 0 else 1)
    # How many rows a prompt has, only the server knows.
    max_rows = None if body.get("return_prompt_logits") or body.get("echo") else limit
    return RowsCall(path, _encode(body), [max_rows] * num_choices, _generation)


def _max_scored(sequence: Mapping[str, Any], options: Mapping[str, Any]) -> int | None:
    """Return how many rows a sequence has, if its tokens are known here."""
    token_ids, prompt_length = sequence.get("token_ids"), sequence.get("prompt_length")
    if not isinstance(token_ids, Sequence | np.ndarray):
        return None
    start = 1
    if isinstance(prompt_length, int) and options.get("range") != "all":
        start = max(1, prompt_length)
    return max(0, len(token_ids) - start + bool(options.get("next_token")))


def _received(table: Table, num_choices: int) -> list[Received]:
    """Return the rows of each choice."""
    choices = table.columns.get("choice", [])
    found = []
    for choice in range(num_choices):
        rows = None if table.parts is None else table.parts[choice]
        columns = table.columns
        if num_choices > 1:
            own = [place for place, each in enumerate(choices) if each == choice]
            columns = {name: [values[place] for place in own] for name, values in columns.items()}
        found.append(Received(table.schema, columns, rows))
    return found


def _generation(table: Table) -> Generation:
    """Return the completions of a stream, the first with the others in it."""
    end = table.end
    try:
        wires = sorted(end["choices"], key=lambda wire: wire["index"])
        parts = zip(wires, _received(table, len(wires)), strict=True)
        (wire, received), *behind = parts
        return _choice(end, wire, received, tuple(_choice(end, *each) for each in behind))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise IncompleteStreamError("the end record of the stream lacks what it should have") from error


def _choice(
    end: Mapping[str, Any],
    wire: Mapping[str, Any],
    received: Received,
    others: tuple[Generation, ...] = (),
) -> Generation:
    message = wire.get("message") or {}
    columns, rows = received.columns, received.rows
    # The prompt's rows come first.
    num_prompt = columns["segment"].count("prompt")
    own: Columns = {name: values[num_prompt:] for name, values in columns.items()}
    of_prompt: Columns = {name: values[:num_prompt] for name, values in columns.items()} if num_prompt else {}
    text = message.get("content") if message else wire.get("text")
    return Generation(
        text=text or "",
        reasoning=message.get("reasoning_content"),
        tool_calls=message.get("tool_calls") or [],
        segments=own["segment"],
        token_ids=own["token_id"],
        tokens=own["token"],
        logprobs=np.asarray(own["logprob"], np.float32),
        # The very array where it can be: a pickle or a deep copy then holds the rows once.
        logits=rows if rows is None or not num_prompt else rows[num_prompt:],
        prompt_token_ids=wire.get("prompt_token_ids", end.get("prompt_token_ids")),
        prompt_logits=None if rows is None or not num_prompt else rows[:num_prompt],
        columns=own,
        prompt_columns=of_prompt,
        finish_reason=wire["finish_reason"],
        stop_reason=wire.get("stop_reason"),
        usage=end["usage"],
        metadata=end["metadata"],
        response=dict(end),
        others=others,
        _received=received,
    )


def _scores(table: Table) -> list[Score]:
    end = table.end
    try:
        data = sorted(end["data"], key=lambda each: each["index"])
        return [
            Score(
                token_ids=each["token_ids"],
                positions=each["positions"],
                segments=received.columns["segment"],
                tokens=received.columns["token"],
                logprobs=np.asarray(received.columns["logprob"], np.float32),
                logits=received.rows,
                columns=received.columns,
                usage=end["usage"],
                metadata=end["metadata"],
                response=end,
                _received=received,
            )
            for each, received in zip(data, _received(table, len(data)), strict=True)
        ]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise IncompleteStreamError("the end record of the stream lacks what it should have") from error


def _divergence(answer: Any) -> Divergence:
    try:
        columns = {
            name: np.asarray([np.inf if value is None else value for value in answer[name]], np.float64)
            for name in DIVERGENCE_COLUMNS
        }
        mean = {name: np.inf if value is None else value for name, value in answer["mean"].items()}
        return Divergence(
            token_ids=answer["token_ids"],
            tokens=answer["tokens"],
            **columns,
            log_base=answer["log_base"],
            mean=mean,
            usage=answer["usage"],
            response=answer,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise IncompleteStreamError("the answer lacks what it should have") from error
