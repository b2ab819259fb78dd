"""Chat completions: request, answer and chunk, in OpenAI's field order."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from schemas.base import Count, WireResponse
from schemas.logits import (
    LogitsBlock,
    Metadata,
    SelectedLogits,
    TokenStatsBlock,
    Usage,
)
from schemas.sampling import GenerationFields

Role = Literal["system", "developer", "user", "assistant", "tool"]

FunctionName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,64}$")]


class ContentPart(Struct, frozen=True, kw_only=True):
    """A part of a message; only text parts are supported."""

    type: str
    text: str | None = None


class CalledFunction(Struct, frozen=True, kw_only=True):
    """What an earlier message called; ``arguments`` is JSON, as text or as it is."""

    name: str
    arguments: str | dict[str, Any] = "{}"


class MessageToolCall(Struct, frozen=True, kw_only=True):
    """A call in an earlier message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Struct, frozen=True, kw_only=True):
    """One message of the conversation. Fields that are not listed here are ignored, as OpenAI does."""

    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class FunctionDefinition(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A function that the model may call; ``parameters`` is a JSON Schema."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tool; only functions are supported."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Struct, frozen=True, kw_only=True):
    """The name of a function that must be called."""

    name: FunctionName


class NamedTool(Struct, frozen=True, kw_only=True):
    """The choice of one tool; ``service`` checks its type."""

    type: str = "function"
    function: NamedFunction | None = None


class ChatRequest(GenerationFields, frozen=True, kw_only=True):
    """The body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=-1)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None

    # Beyond OpenAI: prompt.
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None


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
    """One entry per generated token, whatever text was cut.

    ``reasoning``, ``tool`` and ``special`` are there only where a parser splits the answer into segments;
    else ``content`` has all entries.
    """

    content: list[TokenLogprob] | Raw
    refusal: None = None
    reasoning: list[TokenLogprob] | Raw | UnsetType = UNSET
    tool: list[TokenLogprob] | Raw | UnsetType = UNSET
    special: list[TokenLogprob] | Raw | UnsetType = UNSET


class FunctionCall(WireResponse, frozen=True, kw_only=True):
    """What to call, with which arguments: JSON as the model wrote it, which may be invalid."""

    name: str
    arguments: str


class ToolCall(WireResponse, frozen=True, kw_only=True):
    """One call of a tool."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class AssistantMessage(WireResponse, frozen=True, kw_only=True):
    """What the model said. ``content`` is null where it only called tools."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | None | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


FinishReason = Literal["stop", "length", "tool_calls", "abort"]


class ChatChoice(WireResponse, frozen=True, kw_only=True):
    """One completion. ``segments`` has one word per token id, where a parser splits the answer."""

    index: int
    message: AssistantMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET
    segments: list[str] | UnsetType = UNSET
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


class FunctionCallDelta(WireResponse, frozen=True, kw_only=True):
    """The next part of a call; the name comes whole, with the first one."""

    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(WireResponse, frozen=True, kw_only=True):
    """The next part of the tool call at ``index``; the id comes with the first one."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionCallDelta


class ChatDelta(WireResponse, frozen=True, kw_only=True):
    """What a chunk adds to the message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(WireResponse, frozen=True, kw_only=True):
    """What a chunk adds to one choice: text, and everything else that belongs to the same tokens."""

    index: int
    delta: ChatDelta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    segments: list[str] | UnsetType = UNSET
    logits: LogitsBlock | UnsetType = UNSET
    selected_logits: SelectedLogits | UnsetType = UNSET
    token_stats: TokenStatsBlock | UnsetType = UNSET


class ChatChunk(WireResponse, frozen=True, kw_only=True):
    """One event of a stream. ``usage`` is there only if the request asked for it."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None | UnsetType = UNSET
    metadata: Metadata | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logits: LogitsBlock | UnsetType = UNSET
