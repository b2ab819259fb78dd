"""What every answer with rows carries: the rows themselves, statements on their numbers, usage."""

from typing import Literal

import msgspec

from schemas.base import WireResponse

LogitsEncoding = Literal["json", "b64_fp16", "b64_fp32"]


class LogitsBlock(WireResponse, frozen=True, kw_only=True):
    """Raw rows of one choice. ``data[t]`` is the distribution that produced generated token ``t``.

    ``data`` holds one base64 string of little-endian values a row, or one list of numbers a row; there null
    stands for -inf.
    """

    encoding: LogitsEncoding
    dtype: Literal["float16", "float32"]
    shape: tuple[int, int]
    data: list[str | list[float | None]] | msgspec.Raw


class SelectedLogits(WireResponse, frozen=True, kw_only=True):
    """Some columns of the raw rows of one choice; ``values[t][k]`` is float32, at ``token_ids[k]``."""

    token_ids: list[int]
    values: list[list[float | None]] | msgspec.Raw


class TokenStatsBlock(WireResponse, frozen=True, kw_only=True):
    """Statistics of the raw rows of one choice, exact over the whole row, one value per generated token.

    ``entropy`` is in nats; ``rank`` is that of the emitted token, 1 = argmax; ``margin`` is the largest logit
    less the second.
    """

    entropy: list[float]
    logsumexp: list[float]
    rank: list[int]
    margin: list[float | None]


class Metadata(WireResponse, frozen=True, kw_only=True):
    """How to read the numbers of an answer. ``stop_sequence_hit`` is that of choice 0."""

    stop_sequence_hit: str | None
    vocab_size: int
    tokenizer_vocab_size: int
    source_dtype: str
    wire_dtype: str | None
    do_sample: bool
    semantics: Literal["raw"] = "raw"


class PromptTokensDetails(WireResponse, frozen=True, kw_only=True):
    """How many of the prompt's tokens did not have to be run, since an earlier prompt began alike."""

    cached_tokens: int


class CompletionTokensDetails(WireResponse, frozen=True, kw_only=True):
    """How many of the completion's tokens were reasoning, shown or not."""

    reasoning_tokens: int


class Usage(WireResponse, frozen=True, kw_only=True):
    """Token counts; an end token that was generated counts, and so does what is hidden."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET
