"""The fields that every request for a completion shares, chat or not."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from schemas.base import (
    Count,
    Int64,
    Penalty,
    Probability,
    StopString,
    StopStrings,
    Temperature,
    TokenId,
    WireRequest,
)
from schemas.logits import LogitsEncoding


class StreamOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a stream carries beside its text.

    ``include_usage`` adds a last chunk with the totals, ``continuous_usage_stats`` the counts so far to each
    chunk. ``include_obfuscation`` is OpenAI's padding against listeners; it is never sent.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationFields(WireRequest, frozen=True, kw_only=True):
    """What to generate, how, and what to return of it."""

    model: str | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    seed: Int64 | None = None
    stop: StopString | StopStrings | None = None
    max_tokens: Count | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None

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
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None

    # Beyond OpenAI: queue.
    priority: Int64 | None = None

    # Accepted and without effect.
    user: str | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


UNSUPPORTED: dict[str, tuple[object, ...]] = {
    # OpenAI's.
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_cache_retention": ("in_memory", "in-memory", "24h"),
    "verbosity": ("medium",),
    "web_search_options": (),
    # vLLM's.
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "cache_salt": ("",),
    "content_parts": ([],),
    "documents": ([],),
    "ec_transfer_params": (),
    "extra_args": ({},),
    "features": (),
    "flat_logprobs": (False,),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "lora_name": (),
    "lora_request": (),
    "mm_processor_kwargs": ({},),
    "prompt_logprobs": (),
    "reasoning_ended": (),
    "reasoning_parser_kwargs": (),
    "return_token_offsets": (False,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "token_offsets": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}
"""Fields that other servers know and this one does not, each with the values that ask for nothing."""
