"""What crosses the engine's border: requests in, events out. Frozen and fully resolved.

No optional here means "take a default": defaults are the service's business.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from engine.grammar import Grammar

BYTES_PER_VALUE = 36
"""Of a number in a list: the object and the reference to it."""


class FinishReason(StrEnum):
    """Why a sequence ended. Failures are exceptions."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class RowDtype(StrEnum):
    """The dtype in which rows leave the device."""

    FLOAT16 = "float16"
    FLOAT32 = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen from a row. Rows with equal params share one group.

    Neutral values: ``temperature`` 1, ``top_p`` 1, ``top_k`` 0, ``min_p`` 0, ``repetition_penalty`` 1, both
    other penalties 0. ``temperature`` 0 is greedy: the argmax, the lowest id on a tie. ``repetition_penalty``
    looks at prompt and completion, the other two at the completion. ``logit_bias`` holds (id, bias) pairs.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """A second context for the same tokens, to compare the two models of them that the contexts make.

    Attributes:
        token_ids: The second context, and behind it the tokens that the request's prompt has from its
            ``prompt_start`` on.
        start: Where those tokens begin.
        temperature: By which both rows are divided before they are compared; positive.
    """

    token_ids: tuple[int, ...]
    start: int
    temperature: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt to continue.

    Attributes:
        request_id: Names the request in logs and in :meth:`engine.engine.Engine.cancel`.
        prompt_token_ids: At least one id, each below the model's ``vocab_size``.
        max_tokens: Tokens to generate at most; ``None`` fills the context.
        sampling: How tokens are chosen.
        seed: Seeds this sequence's own generator; ``None`` draws a fresh one.
        stop: Strings that end the text before their first character.
        stop_token_ids: Ids that end the sequence; the id itself is kept, its text is not.
        ignore_eos: Go on past the model's end tokens.
        min_tokens: Tokens before which no end token, stop token or stop string ends the sequence.
        include_stop: Keep the stop string, or the stop token's text, that ends the text.
        skip_special_tokens: Leave special tokens out of the text.
        priority: Lower goes first among those that wait.
        row_dtype: Ask for the raw row of every token, in this dtype.
        logprobs: Ask for the logprob of every token.
        num_top_logprobs: Ask also for that many best alternatives; needs ``logprobs``.
        ranks: Ask also for the rank of every token; needs ``logprobs``.
        logprob_token_ids: Ask also for the logprobs of these ids; needs ``logprobs``.
        sampling_support: Ask for the ids that bias, penalties and filters left to be drawn.
        token_stats: Ask for the statistics of every row; brings the logprob along.
        logit_token_ids: Ask for these columns of every row.
        prompt_row_dtype: Ask for the raw rows that predict the prompt's tokens, in this dtype.
        prompt_logprobs: Ask for the logprobs of those tokens, and ``num_prompt_top_logprobs`` alternatives.
        prompt_start: The first of those tokens, at least 1; what stands before is context only.
        prompt_logprob_token_ids: Ask for the logprobs of these ids in those rows, one list a row.
        prompt_columns: Ask for these columns of those rows, one list a row, in place of ``logit_token_ids``.
        next_row: Ask also for the row behind the last token; only with ``max_tokens`` 0. Its event has the
            token id -1, the logprob 0 and the rank 0.
        contrast: Ask for the divergence of those rows from the rows of a second context. Nothing else comes,
            and only with ``max_tokens`` 0.
        held_bytes: Bytes of rows that the request may hold at once, until it is cancelled.
        grammar: What the completion obeys. It ends where that has ended, ``ignore_eos`` or not.
        grammar_after: The grammar starts behind this text in the completion; ``None`` starts it at once.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int | None
    sampling: SamplingParams = SamplingParams()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_tokens: int = 0
    include_stop: bool = False
    skip_special_tokens: bool = True
    priority: int = 0
    row_dtype: RowDtype | None = None
    logprobs: bool = False
    num_top_logprobs: int = 0
    ranks: bool = False
    logprob_token_ids: tuple[int, ...] = ()
    sampling_support: bool = False
    token_stats: bool = False
    logit_token_ids: tuple[int, ...] = ()
    prompt_row_dtype: RowDtype | None = None
    prompt_logprobs: bool = False
    num_prompt_top_logprobs: int = 0
    prompt_start: int = 1
    prompt_logprob_token_ids: tuple[tuple[int, ...], ...] = ()
    prompt_columns: tuple[tuple[int, ...], ...] = ()
    next_row: bool = False
    contrast: Contrast | None = None
    held_bytes: int = 0
    grammar: Grammar | None = None
    grammar_after: str | None = None


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """The best alternatives of one position, best first."""

    token_ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True, slots=True)
class TokenStats:
    """Statistics of one raw row, exact over all of V.

    Attributes:
        entropy: Of its softmax, in nats.
        logsumexp: The logarithm of the softmax's denominator.
        rank: Of the token: one more than the number of larger logits, so 1 is the argmax.
        margin: The largest logit less the second.
    """

    entropy: float
    logsumexp: float
    rank: int
    margin: float


@dataclass(frozen=True, slots=True)
class Divergence:
    """How far two distributions of one token are apart; p is the request's own context, q the contrast.

    Attributes:
        jsd: Jensen-Shannon divergence, in nats.
        kl_pq, kl_qp: Kullback-Leibler divergences, in nats; infinite where one has no support.
        tvd: Total variation distance, 0 to 1.
        entropy_p, entropy_q: In nats.
        logprob_p, logprob_q: Of the token, in the raw rows, before any temperature.
    """

    jsd: float
    kl_pq: float
    kl_qp: float
    tvd: float
    entropy_p: float
    entropy_q: float
    logprob_p: float
    logprob_q: float


TOP_BYTES = 2 * BYTES_PER_VALUE
"""Of one alternative while it is held: an id and a logprob."""


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One generated token; or, before those, one token of the prompt with the row that predicts it.

    Attributes:
        token_id: The token that was chosen.
        texts: The own texts of the tokens whose text became final with this one, oldest first, one string a
            token. Text that may still begin a stop string, or is half a character, is not final.
        logprob: float32 log-softmax of the raw row over all of V, at ``token_id``; if asked for.
        top_logprobs: From the same log-softmax; if asked for.
        row: (V,) float16 or float32, read-only: the raw distribution that produced ``token_id``.
        stats: Of that row; if asked for.
        selected: float32 (k,), read-only: the row at the ids asked for.
        is_prompt: Whether it is a token of the prompt.
        rank: One more than the number of larger logits in that row; if asked for.
        id_logprobs: Of the ids asked for, in their order, from the same log-softmax.
        support: The ids among which the token was drawn; if asked for.
        divergence: Of the two contexts' rows, if the request compares two.
    """

    token_id: int
    texts: tuple[str, ...]
    logprob: float | None = None
    top_logprobs: TopLogprobs | None = None
    row: NDArray[np.floating] | None = None
    stats: TokenStats | None = None
    selected: NDArray[np.float32] | None = None
    is_prompt: bool = False
    rank: int | None = None
    id_logprobs: TopLogprobs | None = None
    support: list[int] | None = None
    divergence: Divergence | None = None

    @property
    def text(self) -> str:
        """The text that became final with this token, whichever tokens it belongs to."""
        return "".join(self.texts)

    @property
    def num_bytes(self) -> int:
        """Bytes that this event holds in an outbox, without the small parts."""
        num_bytes = BYTES_PER_VALUE * len(self.support or ())
        for tops in (self.top_logprobs, self.id_logprobs):
            num_bytes += 0 if tops is None else TOP_BYTES * len(tops.token_ids)
        arrays = (self.row, self.selected)
        return num_bytes + sum(each.nbytes for each in arrays if each is not None)


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds a sequence spent where, and the sizes of the batches that it was part of."""

    queue_s: float
    prefill_s: float
    decode_s: float
    max_batch_size: int
    mean_batch_size: float


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a sequence; the last event of its request.

    Attributes:
        reason: Stop or length.
        stop_reason: The stop string or stop token id that was met; ``None`` for an end token or length.
        timings: For logs and metrics.
        num_cached: Prompt tokens whose keys and values an earlier sequence left behind.
        texts: As those of :class:`TokenEvent`, if the end came without a token.
    """

    reason: FinishReason
    stop_reason: str | int | None
    timings: Timings
    num_cached: int = 0
    texts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Facts of the loaded model that callers need.

    Attributes:
        name: The name under which the checkpoint was loaded.
        vocab_size: V, the width of a logits row; padding rows of the head included.
        tokenizer_vocab_size: One more than the largest id that the tokenizer can decode.
        dtype: The dtype that the head returns, such as ``bfloat16``.
        max_model_len: Tokens of prompt and completion together.
        sampling: The checkpoint's own settings, from its ``generation_config``.
        path: How sequences share forward passes; ``one_at_a_time`` gives each its own.
        device_map: Which module lies on which device.
    """

    name: str
    vocab_size: int
    tokenizer_vocab_size: int
    dtype: str
    max_model_len: int
    path: str = "one_at_a_time"
    sampling: SamplingParams = SamplingParams()
    device_map: Mapping[str, str] = field(default_factory=dict)
