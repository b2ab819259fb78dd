"""Chat completions: request and answer, in OpenAI's field order."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from schemas.base import (
    Int64,
    Penalty,
    Probability,
    StopString,
    StopStrings,
    Temperature,
    TokenId,
    WireRequest,
    WireResponse,
)
from schemas.logits import (
    LogitsBlock,
    LogitsEncoding,
    Metadata,
    SelectedLogits,
    TokenStatsBlock,
    Usage,
)

Role = Literal["system", "developer", "user", "assistant", "tool"]


class ContentPart(Struct, frozen=True, kw_only=True):
    """A part of a message; only text parts are supported."""

    type: str
    text: str | None = None


class ChatMessage(Struct, frozen=True, kw_only=True):
    """One message of the conversation. Fields that are not listed here are ignored, as OpenAI does."""

    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class ChatRequest(WireRequest, frozen=True, kw_only=True):
    """The body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    model: str | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    seed: Int64 | None = None
    stop: StopString | StopStrings | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=2**53)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=0, le=2**53)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None

    # Beyond OpenAI: rows.
    return_logits: bool | None = None
    return_prompt_logits: bool | None = None
    return_logprobs: bool | None = None
    logits_encoding: LogitsEncoding | None = None
    logit_token_ids: list[TokenId] | None = None
    token_stats: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    arrow_compression: Literal["lz4", "zstd"] | None = None

    # Beyond OpenAI: sampling.
    do_sample: bool | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Probability | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None

    # Beyond OpenAI: prompt and queue.
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    priority: int | None = None

    # Accepted and without effect.
    user: str | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class TopLogprob(WireResponse, frozen=True, kw_only=True):
    """One alternative of a position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(WireResponse, frozen=True, kw_only=True):
    """One generated token. ``bytes`` are its own, which may be a fragment of a character."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(WireResponse, frozen=True, kw_only=True):
    """One entry per generated token, whatever text was cut."""

    content: list[TokenLogprob]
    refusal: None = None


class AssistantMessage(WireResponse, frozen=True, kw_only=True):
    """What the model said."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(WireResponse, frozen=True, kw_only=True):
    """One completion."""

    index: int
    message: AssistantMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET
    logits: LogitsBlock | UnsetType = UNSET
    selected_logits: SelectedLogits | UnsetType = UNSET
    token_stats: TokenStatsBlock | UnsetType = UNSET


class ChatCompletion(WireResponse, frozen=True, kw_only=True):
    """The whole answer. In Arrow's end record it stands without rows, but with their number per choice."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    metadata: Metadata
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logits: LogitsBlock | UnsetType = UNSET
    rows: list[int] | UnsetType = UNSET
