"""Tokens in, tokens out, in vLLM's shape; and what renders a request to it, or ids back to a message."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from schemas.base import Count, StopString, TokenId, WireRequest, WireResponse, one_of
from schemas.chat import AssistantMessage, ChatDelta
from schemas.chat import FinishReason as ChatFinishReason
from schemas.logits import LogitsBlock, Metadata, SelectedLogits, TokenStatsBlock, Usage
from schemas.sampling import GenerationFields

OutputMode = Literal["tokens", "text", "derender"]

RequestId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]


class ParseFunction(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A function that may have to be called; ``parameters`` is a JSON Schema."""

    name: str
    parameters: dict[str, Any] | None = None


class ParseContext(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What it takes to read a completion as the chat message that the request would have got.

    Attributes:
        reasoning: The two markers around reasoning.
        in_reasoning: The prompt ends inside reasoning.
        tools: The form of tool calls.
        functions: Those that may be called, if one must be; ``is_named`` if the request named it.
        is_many: Whether several calls may come.
        include_reasoning: False hides it.
        stop, stop_token_ids, include_stop_str_in_output, skip_special_tokens, min_tokens: What cut the text.
    """

    reasoning: tuple[str, str] | None = None
    in_reasoning: bool = False
    tools: Literal["hermes", "llama3", "mistral"] | None = None
    functions: list[ParseFunction] = []
    is_named: bool = False
    is_many: bool = True
    include_reasoning: bool = True
    stop: list[StopString] = []
    stop_token_ids: list[TokenId] = []
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    min_tokens: Count = 0


class GenerateRequest(GenerationFields, frozen=True, kw_only=True):
    """The body of ``POST /inference/v1/generate``.

    ``prompt_logprob_token_ids`` has one list per prompt token behind ``prompt_logprob_start``; -1 fills up.

    All but ``token_ids``, ``request_id``, ``output_mode``, ``stream``, ``stream_options`` and
    ``parse_context`` may stand inside ``sampling_params`` or beside it.
    """

    token_ids: Annotated[list[TokenId], Meta(min_length=1)]
    request_id: RequestId | None = None
    output_mode: OutputMode | None = None
    parse_context: ParseContext | None = None
    logprobs: Annotated[int, Meta(ge=-1)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=-1)] | None = None
    logprob_token_ids: list[TokenId] | None = None
    prompt_logprob_token_ids: list[list[Annotated[int, Meta(ge=-1, le=2**31 - 1)]]] | None = None
    prompt_logprob_start: Count | None = None
    return_sampling_mask: bool | None = None
    detokenize: bool | None = None


class IdLogprob(WireResponse, frozen=True, kw_only=True):
    """One candidate of a position. ``rank`` is null where nobody counted it."""

    token_id: int
    logprob: float
    rank: int | None


class SampledLogprob(WireResponse, frozen=True, kw_only=True):
    """The token of a position, and candidates: itself first, then the best ones."""

    token_id: int
    logprob: float
    rank: int | None
    top_logprobs: list[IdLogprob]


class IdLogprobs(WireResponse, frozen=True, kw_only=True):
    """One entry per generated token."""

    content: list[SampledLogprob] | Raw


class PromptLogprob(WireResponse, frozen=True, kw_only=True):
    """One candidate of a prompt's position; the key of its map is its id."""

    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class GenerateChoice(WireResponse, frozen=True, kw_only=True):
    """One completion, or what a chunk adds to it. What its ``output_mode`` has not is absent."""

    index: int
    text: str | UnsetType = UNSET
    message: AssistantMessage | UnsetType = UNSET
    delta: ChatDelta | UnsetType = UNSET
    logprobs: Annotated[Any, one_of("IdLogprobs", "ChoiceLogprobs", or_null=True)] = None
    finish_reason: ChatFinishReason | None = None
    stop_reason: str | int | None | UnsetType = UNSET
    token_ids: list[int] = []
    segments: list[str] | UnsetType = UNSET
    sampling_mask: list[list[int]] | Raw | UnsetType = UNSET
    logits: LogitsBlock | UnsetType = UNSET
    selected_logits: SelectedLogits | UnsetType = UNSET
    token_stats: TokenStatsBlock | UnsetType = UNSET


class GenerateAnswer(WireResponse, frozen=True, kw_only=True):
    """The whole answer, or one event of a stream."""

    request_id: str
    model: str
    created: int
    output_mode: OutputMode
    choices: list[GenerateChoice]
    usage: Usage | None | UnsetType = UNSET
    metadata: Metadata | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | Raw | UnsetType = UNSET
    prompt_token_id_logprobs: str | UnsetType = UNSET
    """A float32 array (rows, columns) as a ``.npy`` file in base64; what was -1 is -inf."""
    prompt_logits: LogitsBlock | UnsetType = UNSET
    rows: list[int] | UnsetType = UNSET


class RenderedRequest(WireResponse, frozen=True, kw_only=True):
    """A body for ``POST /inference/v1/generate`` that generates what the rendered request would."""

    model: str
    token_ids: list[int]
    sampling_params: dict[str, Any]
    stream: bool
    stream_options: Any = UNSET
    output_mode: OutputMode
    parse_context: ParseContext | UnsetType = UNSET


class DerenderRequest(WireRequest, frozen=True, kw_only=True):
    """The body of ``POST /v1/chat/completions/derender``."""

    token_ids: list[TokenId]
    parse_context: ParseContext | None = None
    finish_reason: Literal["stop", "length", "abort", "tool_calls"] | None = None
    model: str | None = None


class DerenderedMessage(WireResponse, frozen=True, kw_only=True):
    """The message that ids spell."""

    message: AssistantMessage
    finish_reason: str


class AbortRequest(WireRequest, frozen=True, kw_only=True):
    """The body of ``POST /abort_requests``."""

    request_ids: Annotated[list[str], Meta(max_length=10_000)]


class AbortAnswer(WireResponse, frozen=True, kw_only=True):
    """The ids of those that were there."""

    aborted: list[str]
