"""What calls return: small objects, whose rows are the memory that was received into."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from logitwire.rows import Rows
from logitwire.views import shown

Columns = dict[str, list[Any]]
"""Columns of the wire by name, one value per row."""


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One token, as soon as it arrives.

    Attributes:
        choice: Index of the completion, or of the scored sequence.
        position: Place in its part: from 0 in the prompt and from 0 in the completion; of a scored sequence
            the index in its tokens.
        segment: "prompt", "content", "reasoning", "tool" or "special".
        token_id: Of the token; -1 behind the last token of a scored sequence.
        token: Its text.
        token_bytes: Its own UTF-8 bytes.
        logprob: log-softmax of the raw row over all of V, at this token.
        logits: (V,) float16 or float32, read-only, and valid for as long as it is held; the distribution that
            produced or predicts this token. ``None`` if no rows were asked for.
        columns: The other values of the row by name, such as ``entropy`` with ``token_stats=True``.
        finish_reason: With the last row of each choice.
    """

    choice: int
    position: int
    segment: str
    token_id: int
    token: str
    token_bytes: bytes
    logprob: float
    logits: Rows | None
    columns: dict[str, Any]
    finish_reason: str | None


@dataclass(frozen=True, slots=True, eq=False)
class Received:
    """All rows of one choice, as they came.

    Attributes:
        schema: Of the stream.
        columns: The small columns.
        rows: (T, V), read-only; ``None`` if there are none, or if they were not kept.
    """

    schema: pa.Schema
    columns: Columns
    rows: Rows | None

    def to_arrow(self) -> pa.Table:
        """Return the rows as a table of the stream's schema; ``logits`` is not copied."""
        arrays = []
        fields = [each for each in self.schema if each.name != "logits" or self.rows is not None]
        for each in fields:
            if each.name == "logits" and self.rows is not None:
                kind = each.type
                flat = pa.Array.from_buffers(
                    kind.value_type, self.rows.size, [None, pa.py_buffer(self.rows.reshape(-1))]
                )
                arrays.append(pa.FixedSizeListArray.from_arrays(flat, type=kind))
            else:
                arrays.append(pa.array(self.columns[each.name], each.type))
        return pa.Table.from_arrays(arrays, schema=pa.schema(fields, metadata=self.schema.metadata))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Generation:
    """One completion of T tokens, the end token included if one was generated.

    Attributes:
        text: What the model said; stop strings and special tokens are cut from it only. With ``echo=True``
            the prompt stands before it. Empty in the output mode "tokens" of ``generate``.
        reasoning: What it thought before that, if the server splits that off and it is not hidden.
        tool_calls: OpenAI's objects, if it called tools.
        segments: T words: "content", "reasoning", "tool" or "special".
        token_ids: T ids.
        tokens: T token texts.
        logprobs: float32 (T,): log-softmax of the raw row over all of V, at the emitted token.
        logits: (T, V) float16 or float32, read-only. ``logits[t]`` is the distribution that produced token t.
            It is the memory that was received into. ``None`` if no rows were asked for.
        prompt_token_ids: P ids, if the answer has them.
        prompt_logits: (P - 1, V), read-only, with ``return_prompt_logits=True``: the rows that predict the
            prompt's tokens 1 to P-1. ``None`` without.
        columns: The stream's columns by name, T values each, such as ``entropy`` with ``token_stats=True``,
            or ``selected_logits`` with ``logit_token_ids``.
        prompt_columns: The same for the prompt's rows, P - 1 values each; empty without.
        finish_reason: "stop", "length", "tool_calls" or "abort".
        stop_reason: The stop string or stop token id that was met, if any.
        usage: Token counts of the whole answer.
        metadata: What the numbers are: ``source_dtype``, ``wire_dtype``, ``vocab_size`` and so on.
        response: The whole answer without rows, in the shape of its endpoint.
        others: The completions behind this one, with ``n`` or several prompts.
    """

    text: str
    reasoning: str | None
    tool_calls: list[dict[str, Any]]
    segments: list[str]
    token_ids: list[int]
    tokens: list[str]
    logprobs: NDArray[np.float32]
    logits: Rows | None
    prompt_token_ids: list[int] | None
    prompt_logits: Rows | None
    columns: Columns
    prompt_columns: Columns
    finish_reason: str
    stop_reason: str | int | None
    usage: dict[str, Any]
    metadata: dict[str, Any]
    response: dict[str, Any]
    others: tuple["Generation", ...]
    _received: Received

    def __repr__(self) -> str:
        return (
            f"<Generation {self.text!r}, {len(self.token_ids)} tokens, {shown(self.logits)}, "
            f"finish_reason={self.finish_reason!r}>"
        )

    @property
    def choices(self) -> tuple["Generation", ...]:
        """Return all completions of the answer, in their order; this one is the first."""
        return (self, *self.others)

    def to_arrow(self) -> pa.Table:
        """Return the rows of this completion as they came, those of the prompt first.

        Columns and metadata are those of the wire. The column ``logits`` is the memory of the rows: nothing
        is copied.
        """
        return self._received.to_arrow()


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Score:
    """T rows of one sequence of given tokens: what the model says of tokens that it did not choose.

    Attributes:
        token_ids: All ids of the sequence, those without a row too.
        positions: T places in ``token_ids``. The row at position i predicts token i, so position 0 has none.
            With ``next_token=True`` the last one lies behind the last token.
        segments: T words: "prompt" for context, "content" for what follows it.
        tokens: T token texts.
        logprobs: float32 (T,): log-softmax of the raw row over all of V, at the token that is there; 0 for a
            ``next_token`` row.
        logits: (T, V) float16 or float32, read-only. ``logits[t]`` is the distribution that predicts
            ``token_ids[positions[t]]``. It is the memory that was received into. ``None`` if no rows were
            asked for.
        columns: The stream's columns by name, T values each, such as ``entropy`` with ``token_stats=True``,
            ``top_token_ids`` and ``top_logprobs`` with ``top_logprobs``, or ``selected_logits``.
        usage: Token counts of all sequences.
        metadata: What the numbers are: ``source_dtype``, ``wire_dtype``, ``vocab_size`` and so on.
        response: The whole answer without numbers, all sequences in it.
    """

    token_ids: list[int]
    positions: list[int]
    segments: list[str]
    tokens: list[str]
    logprobs: NDArray[np.float32]
    logits: Rows | None
    columns: Columns
    usage: dict[str, Any]
    metadata: dict[str, Any]
    response: dict[str, Any]
    _received: Received

    def __repr__(self) -> str:
        return f"<Score of {len(self.token_ids)} tokens, {shown(self.logits)}>"

    def to_arrow(self) -> pa.Table:
        """Return the rows of this sequence with the wire's columns and metadata; ``logits`` is not copied."""
        return self._received.to_arrow()


@dataclass(frozen=True, slots=True)
class DivergenceStep:
    """The comparison at one token of the completion; see :class:`Divergence`."""

    position: int
    token_id: int
    token: str
    jsd: float
    kl_pq: float
    kl_qp: float
    tvd: float
    entropy_p: float
    entropy_q: float
    logprob_p: float
    logprob_q: float


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Divergence:
    """How far two contexts' distributions of the same T tokens are apart, as the server computed it.

    Iterating gives one :class:`DivergenceStep` per token.

    Attributes:
        token_ids: T ids of the completion.
        tokens: T token texts.
        jsd: float64 (T,): Jensen-Shannon divergence, in units of ``log_base``; 0 to 1 in base 2.
        kl_pq: float64 (T,): KL(P || Q), in units of ``log_base``; may be infinite.
        kl_qp: float64 (T,): KL(Q || P), likewise.
        tvd: float64 (T,): total variation distance, 0 to 1.
        entropy_p: float64 (T,), in units of ``log_base``.
        entropy_q: float64 (T,), in units of ``log_base``.
        logprob_p: float64 (T,): natural logarithm of the token's probability behind ``p``.
        logprob_q: float64 (T,): likewise behind ``q``.
        log_base: 2 or "e".
        mean: Means over the tokens of ``jsd``, ``kl_pq``, ``kl_qp`` and ``tvd``; may be infinite.
        usage: Token counts.
        response: The whole answer.
    """

    token_ids: list[int]
    tokens: list[str]
    jsd: NDArray[np.float64]
    kl_pq: NDArray[np.float64]
    kl_qp: NDArray[np.float64]
    tvd: NDArray[np.float64]
    entropy_p: NDArray[np.float64]
    entropy_q: NDArray[np.float64]
    logprob_p: NDArray[np.float64]
    logprob_q: NDArray[np.float64]
    log_base: int | str
    mean: dict[str, float]
    usage: dict[str, Any]
    response: dict[str, Any]

    def __repr__(self) -> str:
        return f"<Divergence of {len(self)} tokens, log_base={self.log_base!r}, mean={self.mean}>"

    def __len__(self) -> int:
        """Return T."""
        return len(self.token_ids)

    def __iter__(self) -> Iterator[DivergenceStep]:
        """Give out the comparison token by token."""
        numbers = (getattr(self, name).tolist() for name in DIVERGENCE_COLUMNS)
        for position, values in enumerate(zip(self.token_ids, self.tokens, *numbers, strict=True)):
            yield DivergenceStep(position, *values)


DIVERGENCE_COLUMNS = (
    "jsd",
    "kl_pq",
    "kl_qp",
    "tvd",
    "entropy_p",
    "entropy_q",
    "logprob_p",
    "logprob_q",
)
