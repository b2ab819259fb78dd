"""The file of prompts: one JSON object a line."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from logitwire.capture.records import CaptureError
from logitwire.fields import FIELDS, nearest

Kind: TypeAlias = Literal["prompt", "messages", "token_ids"]

KINDS: tuple[Kind, ...] = ("prompt", "messages", "token_ids")

FIXED = frozenset(
    (
        "return_prompt_logits",
        "logit_token_ids",
        "token_stats",
        "arrow_compression",
        "logprobs",
        "top_logprobs",
    )
)
"""Fields that shape the table, which is one for all prompts."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line.

    Attributes:
        id: Its own, or the number of its line, from 1.
        kind: What it holds.
        content: A text, a conversation, or ids.
        fields: Of its request, which go before those of the capture.
        digest: Of content and fields; another one means that the line has changed.
    """

    id: str
    kind: Kind
    content: str | Sequence[Mapping[str, Any]] | Sequence[int]
    fields: Mapping[str, Any]
    digest: str


def read_prompts(path: str | Path) -> list[Prompt]:
    """Read all prompts; empty lines are passed over.

    Raises:
        OSError: The file cannot be read.
        CaptureError: A line is no prompt, or two have the same id; the message has the number of the line.
    """
    prompts: dict[str, tuple[int, Prompt]] = {}
    for number, line in _lines(Path(path)):
        try:
            prompt = _prompt(number, line)
        except ValueError as error:
            raise CaptureError(f"{path}, line {number}: {error}") from error
        if prompt.id in prompts:
            other = prompts[prompt.id][0]
            raise CaptureError(f"{path}, line {number}: the id {prompt.id!r} is that of line {other}")
        prompts[prompt.id] = number, prompt
    return [prompt for _, prompt in prompts.values()]


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line


def _prompt(number: int, line: bytes) -> Prompt:
    try:
        given = msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"no JSON object: {error}") from error
    own_id = given.pop("id", None)
    if own_id is not None and not isinstance(own_id, str | int):
        raise ValueError(f"id must be a text, not {own_id!r}")
    kinds = [kind for kind in KINDS if kind in given]
    if len(kinds) != 1:
        raise ValueError(f"it needs exactly one of {', '.join(KINDS)}, and has {', '.join(kinds) or 'none'}")
    (kind,) = kinds
    digest = hashlib.sha256(msgspec.json.encode(given, order="sorted")).hexdigest()[:16]
    content = given.pop(kind)
    if not isinstance(content, str if kind == "prompt" else list):
        raise ValueError(f"{kind} must be {'a text' if kind == 'prompt' else 'a list'}")
    for name in given:
        if name in FIXED:
            raise ValueError(f"{name} shapes the table, so it is the same for all prompts: use --set")
        if name not in FIELDS:
            raise ValueError(f"unknown field {name}{nearest(name, [*FIELDS, *KINDS, 'id'])}")
    return Prompt(str(number) if own_id is None else str(own_id), kind, content, given, digest)
