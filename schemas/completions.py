"""Legacy completions: request, answer and chunk, in OpenAI's field order."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Raw, UnsetType

from schemas.base import WireResponse
from schemas.logits import LogitsBlock, Metadata, SelectedLogits, TokenStatsBlock, Usage
from schemas.sampling import GenerationFields


class CompletionRequest(GenerationFields, frozen=True, kw_only=True):
    """The body of ``POST /v1/completions``."""

    prompt: str | list[Any]
    """A text, a list of texts, the ids of one prompt, or a list of such lists."""
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    logprobs: Annotated[int, Meta(ge=-1)] | None = None

    # Beyond OpenAI.
    add_special_tokens: bool | None = None


class CompletionLogprobs(WireResponse, frozen=True, kw_only=True):
    """One value per token in each list. The first token of an echoed prompt has null values.

    ``text_offset`` counts code points from the start of the returned text; all parts of a split character
    share its offset.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | Raw
    text_offset: list[int]


class CompletionChoice(WireResponse, frozen=True, kw_only=True):
    """One completion, or what a chunk adds to it. ``finish_reason`` is null until the last chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length", "abort"] | None
    stop_reason: str | int | None | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    logits: LogitsBlock | UnsetType = UNSET
    selected_logits: SelectedLogits | UnsetType = UNSET
    token_stats: TokenStatsBlock | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    """Here if there are several prompts, else on the answer itself."""
    prompt_logits: LogitsBlock | UnsetType = UNSET


class Completion(WireResponse, frozen=True, kw_only=True):
    """The whole answer, or one event of a stream. A chunk has ``usage`` only if it was asked for."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None | UnsetType = UNSET
    metadata: Metadata | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logits: LogitsBlock | UnsetType = UNSET
    rows: list[int] | UnsetType = UNSET
