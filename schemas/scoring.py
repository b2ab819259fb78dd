"""Given tokens: rows of sequences (``/v1/logits``), and divergences of two contexts (``/v1/divergence``)."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from schemas.base import (
    Count,
    Int64,
    Penalty,
    Probability,
    StopString,
    StopStrings,
    TokenId,
    WireRequest,
    WireResponse,
    one_of,
)
from schemas.chat import ChatMessage
from schemas.logits import LogitsBlock, LogitsEncoding, Metadata, TokenStatsBlock, Usage

Messages = Annotated[list[ChatMessage], Meta(min_length=1)]


class Context(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tokens in one of three forms; exactly one of the fields is given."""

    token_ids: list[TokenId] | None = None
    text: str | None = None
    messages: Messages | None = None


class GivenSequence(Context, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tokens whose rows are wanted. ``completion`` follows the rendered ``messages``."""

    completion: str | None = None
    prompt_length: Count | None = None
    """Tokens that are context only; with ``messages`` it is known."""


class LogitsRequest(WireRequest, frozen=True, kw_only=True):
    """The body of ``POST /v1/logits``."""

    model: str | None = None
    sequences: Annotated[list[GivenSequence], Meta(min_length=1, max_length=64)]
    range: Literal["all", "completion"] | None = None
    next_token: bool | None = None
    return_logits: bool | None = None
    logits_encoding: LogitsEncoding | None = None
    logit_token_ids: list[Any] | None = None
    """Ids, or for each sequence a list of ids per position."""
    token_stats: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=-1)] | None = None
    arrow_compression: Literal["lz4", "zstd"] | None = None
    priority: Int64 | None = None


class RaggedLogits(WireResponse, frozen=True, kw_only=True):
    """Some columns of raw rows; ``values[t][k]`` is float32, at ``token_ids[t][k]``."""

    token_ids: list[list[int]]
    values: list[list[float | None]] | Raw


class Alternative(WireResponse, frozen=True, kw_only=True):
    """One of the best tokens of a position."""

    token_id: int
    logprob: float


class LogitsData(WireResponse, frozen=True, kw_only=True):
    """One sequence. The row at position i predicts token i; the lists cover ``positions``."""

    index: int
    token_ids: list[int]
    positions: list[int]
    logprobs: list[float] | UnsetType = UNSET
    top_logprobs: list[list[Alternative]] | Raw | UnsetType = UNSET
    token_stats: TokenStatsBlock | UnsetType = UNSET
    selected_logits: Annotated[Any, one_of("SelectedLogits", "RaggedLogits")] = UNSET
    logits: LogitsBlock | UnsetType = UNSET


class LogitsAnswer(WireResponse, frozen=True, kw_only=True):
    """The answer of ``POST /v1/logits``; ``rows`` per sequence only in Arrow's end record."""

    object: Literal["logits"] = "logits"
    model: str
    created: int
    data: list[LogitsData]
    usage: Usage
    metadata: Metadata
    rows: list[int] | UnsetType = UNSET


class GivenTokens(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A completion as ids."""

    token_ids: Annotated[list[TokenId], Meta(min_length=1)]


class DivergenceRequest(WireRequest, frozen=True, kw_only=True):
    """The body of ``POST /v1/divergence``. From ``max_tokens`` on, for a generated completion only."""

    model: str | None = None
    p: Context
    q: Context
    completion: Annotated[str, Meta(min_length=1)] | GivenTokens | None = None
    log_base: Literal[2, "e"] | None = None
    temperature: Annotated[float, Meta(gt=0, le=100)] | None = None
    priority: Int64 | None = None

    max_tokens: Annotated[int, Meta(ge=1, le=2**53)] | None = None
    do_sample: bool | None = None
    seed: Int64 | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Probability | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    stop: StopString | StopStrings | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None


class MeanDivergence(WireResponse, frozen=True, kw_only=True):
    """Arithmetic means over the completion's tokens; null where a value is infinite."""

    jsd: float
    kl_pq: float | None
    kl_qp: float | None
    tvd: float


class DivergenceAnswer(WireResponse, frozen=True, kw_only=True):
    """The answer of ``POST /v1/divergence``: lists with one value per token of the completion.

    ``jsd``, ``kl_*`` and ``entropy_*`` are in units of ``log_base``, ``logprob_*`` are natural logarithms of
    the raw rows. An infinite value is null.
    """

    object: Literal["divergence"] = "divergence"
    model: str
    created: int
    log_base: Literal[2, "e"]
    token_ids: list[int]
    tokens: list[str]
    jsd: list[float]
    kl_pq: list[float | None]
    kl_qp: list[float | None]
    tvd: list[float]
    entropy_p: list[float]
    entropy_q: list[float]
    logprob_p: list[float | None]
    logprob_q: list[float | None]
    mean: MeanDivergence
    usage: Usage
