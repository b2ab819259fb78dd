"""The Arrow schema of a logits answer. The client states its own; a contract test holds the two together."""

from collections.abc import Sequence

import pyarrow as pa

MEDIA_TYPE = "application/vnd.apache.arrow.stream"

RESPONSE_KEY = b"logitwire.response"
"""Schema metadata: id, object, created, model and the answer's ``metadata``, as JSON."""

END_KEY = b"logitwire.end"
"""Custom metadata of the last, empty batch of a whole stream: the answer without rows, as JSON."""

ERROR_KEY = b"logitwire.error"
"""Custom metadata of the last, empty batch of a failed stream: the error envelope, as JSON."""


TOP_FIELDS = (
    pa.field("top_token_ids", pa.list_(pa.field("item", pa.int32(), nullable=False)), nullable=False),
    pa.field("top_logprobs", pa.list_(pa.field("item", pa.float32(), nullable=False)), nullable=False),
)
"""Of given tokens' rows, with ``top_logprobs``: the best alternatives of each position, best first."""

RAGGED_FIELDS = (
    pa.field("selected_token_ids", pa.list_(pa.field("item", pa.int32(), nullable=False)), nullable=False),
    pa.field("selected_logits", pa.list_(pa.field("item", pa.float32(), nullable=False)), nullable=False),
)
"""Of given tokens' rows, if each position has columns of its own; ids and values are of equal length."""


def row_schema(
    vocab_size: int,
    dtype: str | None,
    response: bytes,
    *,
    has_stats: bool = False,
    num_selected: int = 0,
    others: Sequence[pa.Field] = (),
) -> pa.Schema:
    """Return the schema of one answer.

    Args:
        vocab_size: V, the fixed length of a ``logits`` value.
        dtype: ``float16`` or ``float32``, of the ``logits`` column; ``None`` leaves the column out.
        response: The value under :data:`RESPONSE_KEY`.
        has_stats: Adds the four columns of statistics.
        num_selected: Length of a ``selected_logits`` value; 0 leaves the column out.
        others: Columns that only some answers have; before ``logits``.

    Returns:
        A schema with ``logits`` last, so that a batch ends with its rows, contiguous.
    """
    fields = [
        pa.field("choice", pa.int32(), nullable=False),
        pa.field("position", pa.int32(), nullable=False),
        pa.field("segment", pa.utf8(), nullable=False),
        pa.field("token_id", pa.int32(), nullable=False),
        pa.field("token", pa.utf8(), nullable=False),
        pa.field("token_bytes", pa.binary(), nullable=False),
        pa.field("logprob", pa.float32(), nullable=False),
    ]
    if has_stats:
        fields += [
            pa.field("entropy", pa.float32(), nullable=False),
            pa.field("logsumexp", pa.float32(), nullable=False),
            pa.field("rank", pa.int32(), nullable=False),
            pa.field("margin", pa.float32(), nullable=False),
        ]
    fields.append(pa.field("finish_reason", pa.utf8()))
    if num_selected:
        fields.append(pa.field("selected_logits", pa.list_(pa.float32(), num_selected), nullable=False))
    fields += others
    if dtype is not None:
        value = pa.float16() if dtype == "float16" else pa.float32()
        fields.append(pa.field("logits", pa.list_(value, vocab_size), nullable=False))
    return pa.schema(fields, metadata={RESPONSE_KEY: response})
