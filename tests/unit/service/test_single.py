"""Batches of one row, held byte for byte against pyarrow's."""

import io
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from engine.types import TokenStats
from schemas.arrow import row_schema
from service.single import ALIGNMENT, Cells, Shape, encode

STATS = TokenStats(entropy=0.5, logsumexp=30.25, rank=2, margin=-1.0)


def cells(shape: Shape, token: str, finish_reason: bytes | None) -> Cells:
    return Cells(
        choice=3,
        position=70_000,
        segment=b"content",
        token_id=97,
        token=token.encode(),
        token_bytes=token.encode() + b"\xff",
        logprob=-1.5,
        stats=STATS if shape.has_stats else None,
        finish_reason=finish_reason,
        selected=np.arange(shape.num_selected, dtype="<f4").tobytes(),
    )


def by_pyarrow(shape: Shape, cells: Cells, row: Any) -> pa.RecordBatch:
    schema = row_schema(
        shape.vocab_size, shape.dtype, b"", has_stats=shape.has_stats, num_selected=shape.num_selected
    )
    values = {
        "choice": cells.choice,
        "position": cells.position,
        "segment": cells.segment.decode(),
        "token_id": cells.token_id,
        "token": cells.token.decode(),
        "token_bytes": cells.token_bytes,
        "logprob": cells.logprob,
        "entropy": STATS.entropy,
        "logsumexp": STATS.logsumexp,
        "rank": STATS.rank,
        "margin": STATS.margin,
        "finish_reason": None if cells.finish_reason is None else cells.finish_reason.decode(),
        "selected_logits": np.frombuffer(cells.selected, "<f4").tolist(),
    }
    columns = [
        pa.FixedSizeListArray.from_arrays(pa.array(row), type=field.type)
        if field.name == "logits"
        else pa.array([values[field.name]], field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


@pytest.mark.parametrize("finish_reason", [None, b"stop", b"length"])
@pytest.mark.parametrize("token", ["", "a", "é", "eight by", "ninebytes", "\ufffd"])
@pytest.mark.parametrize("has_stats", [False, True])
@pytest.mark.parametrize(
    "columns", [(1, "float16", 0), (5, "float32", 0), (33, "float16", 0), (64, "float32", 0), (50, None, 4)]
)
def test_a_batch_of_one_row_is_pyarrows_own(
    columns: tuple[int, str | None, int], has_stats: bool, token: str, finish_reason: bytes | None
) -> None:
    vocab_size, dtype, num_selected = columns
    shape = Shape(vocab_size, dtype, has_stats, num_selected)
    row = np.linspace(-5, 5, vocab_size).astype(dtype or "float32")
    values = cells(shape, token, finish_reason)
    message = encode(shape, values) + (b"" if dtype is None else row.tobytes())
    message += bytes(-len(message) % ALIGNMENT)
    expected = by_pyarrow(shape, values, row)
    assert message == expected.serialize().to_pybytes()
    stream = expected.schema.serialize().to_pybytes() + message
    assert pa.ipc.open_stream(io.BytesIO(stream)).read_all().to_batches() == [expected]
