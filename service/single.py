"""Record batches of one row, written without pyarrow's objects, which cost more than the row.

The head of such a batch depends on the lengths of its strings alone. pyarrow writes one of each kind, and the
others reuse it; only the few values behind it change (Arrow Columnar Format, "Serialization and Interprocess
Communication": each buffer of the body is padded to 8 bytes).
"""

from dataclasses import dataclass
from functools import lru_cache
from struct import Struct

import numpy as np
import pyarrow as pa

from engine.types import TokenStats
from schemas.arrow import row_schema

ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Shape:
    """What the batches of one answer have in common; the arguments of :func:`schemas.arrow.row_schema`."""

    vocab_size: int
    dtype: str | None
    has_stats: bool
    num_selected: int


@dataclass(frozen=True, slots=True)
class Cells:
    """The small values of one row; ``selected`` is little-endian float32."""

    choice: int
    position: int
    segment: bytes
    token_id: int
    token: bytes
    token_bytes: bytes
    logprob: float
    stats: TokenStats | None
    finish_reason: bytes | None
    selected: bytes


def encode(shape: Shape, cells: Cells) -> bytes:
    """Return a record batch message of one row, up to its logits."""
    segment, token, token_bytes, finish = cells.segment, cells.token, cells.token_bytes, cells.finish_reason
    head, body = _layout(
        shape, len(segment), len(token), len(token_bytes), None if finish is None else len(finish)
    )
    values: list[int | float | bytes] = [cells.choice, cells.position, 0, len(segment), segment]
    values += [cells.token_id, 0, len(token), token, 0, len(token_bytes), token_bytes, cells.logprob]
    if cells.stats is not None:
        stats = cells.stats
        values += [stats.entropy, stats.logsumexp, stats.rank, stats.margin]
    if finish is not None:
        values += [0, len(finish), finish]
    if shape.num_selected:
        values.append(cells.selected)
    return head + body.pack(*values)


@lru_cache(4096)
def _layout(
    shape: Shape, num_segment: int, num_token: int, num_bytes: int, num_finish: int | None
) -> tuple[bytes, Struct]:
    """Return the framed head of a batch whose strings have these lengths in bytes, and its small values."""

    def text(num: int) -> str:
        return f"2i{_padded(num)}s"  # two offsets, and the string

    form = f"<i4xi4x{text(num_segment)}i4x{text(num_token)}{text(num_bytes)}f4x"
    form += "f4xf4xi4xf4x" if shape.has_stats else ""
    # A null has a validity bitmap and two offsets of 0.
    form += "16x" if num_finish is None else text(num_finish)
    form += f"{_padded(4 * shape.num_selected)}s" if shape.num_selected else ""
    message = _sample(shape, num_segment, num_token, num_bytes, num_finish)
    length = int.from_bytes(message[4:8], "little")
    return message[: 8 + length], Struct(form)


def _sample(shape: Shape, num_segment: int, num_token: int, num_bytes: int, num_finish: int | None) -> bytes:
    """Return a batch with strings of these lengths, as pyarrow writes it."""
    schema = row_schema(
        shape.vocab_size,
        shape.dtype,
        b"",
        has_stats=shape.has_stats,
        num_selected=shape.num_selected,
    )
    values = {
        "segment": "x" * num_segment,
        "token": "x" * num_token,
        "token_bytes": b"x" * num_bytes,
        "finish_reason": None if num_finish is None else "x" * num_finish,
    }
    columns = []
    for field in schema:
        if pa.types.is_fixed_size_list(field.type):
            zeros = pa.array(np.zeros(field.type.list_size, field.type.value_type.to_pandas_dtype()))
            columns.append(pa.FixedSizeListArray.from_arrays(zeros, type=field.type))
        else:
            columns.append(pa.array([values.get(field.name, 0)], field.type))
    message: bytes = pa.RecordBatch.from_arrays(columns, schema=schema).serialize().to_pybytes()
    return message


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
