"""The fields of requests that a caller may give by name; what they mean, the server's API says.

Any other name is sent along too, so a newer server's fields work; only a type checker minds.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

LogitsDtype = Literal["float16", "float32"]

Message = Mapping[str, Any]

Context = str | Sequence[int] | Sequence[Message] | Mapping[str, Any]
"""A text, token ids, a conversation, or the wire's own object."""


class SamplingOptions(TypedDict, total=False):
    """How tokens are chosen and where they end. Absent and ``None`` leave it to the server."""

    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    do_sample: bool | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    ignore_eos: bool | None
    min_tokens: int | None
    model: str | None
    priority: int | None


class GenerationOptions(SamplingOptions, total=False):
    """What generations have in common."""

    n: int | None
    logit_bias: Mapping[str, float] | None
    return_prompt_logits: bool | None
    logit_token_ids: Sequence[int] | None
    token_stats: bool | None
    arrow_compression: Literal["lz4", "zstd"] | None
    include_stop_str_in_output: bool | None
    skip_special_tokens: bool | None
    response_format: Mapping[str, Any] | None
    logprobs: bool | int | None
    top_logprobs: int | None
    user: str | None


class ChatOptions(GenerationOptions, total=False):
    """Of a conversation."""

    max_completion_tokens: int | None
    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool | None
    reasoning_effort: str | None
    include_reasoning: bool | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template: str | None
    chat_template_kwargs: Mapping[str, Any] | None


class CompleteOptions(GenerationOptions, total=False):
    """Of a text that goes on."""

    echo: bool | None
    add_special_tokens: bool | None


class GenerateOptions(GenerationOptions, total=False):
    """Of token ids that go on."""

    output_mode: Literal["tokens", "text", "derender"] | None
    parse_context: Mapping[str, Any] | None
    request_id: str | None
    prompt_logprobs: int | None
    logprob_token_ids: Sequence[int] | None
    sampling_params: Mapping[str, Any] | None


class ScoreOptions(TypedDict, total=False):
    """Of given tokens."""

    range: Literal["all", "completion"] | None
    next_token: bool | None
    logit_token_ids: Sequence[int] | Sequence[Sequence[Sequence[int]]] | None
    token_stats: bool | None
    top_logprobs: int | None
    arrow_compression: Literal["lz4", "zstd"] | None
    model: str | None
    priority: int | None


class DivergenceOptions(SamplingOptions, total=False):
    """Of a comparison; the sampling fields are for a completion that is generated."""

    log_base: Literal[2, "e"]
