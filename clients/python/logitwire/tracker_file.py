"""The file of a tracker: Parquet, one row per token of each iteration.

Columns: ``iteration``, ``position``, ``token_id``, ``token``; ``previous_position``, ``kind`` and ``jsd``,
    null where the
position was not compared with the iteration before; and ``logits``, a fixed-size list of half or single
floats, null where the rows are not kept, and left out if none are. What belongs to an iteration as a whole,
and the tracker's options, are JSON in the schema's metadata.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from logitwire.alignment import Alignment
from logitwire.files import TRACKER_KEY, RowFileError, RowGroups
from logitwire.iterations import Comparison, Iteration

GROUP_BYTES = 16 * 2**20
"""Bytes of rows in one row group, which is the least that can be read back."""


def write(
    path: Path,
    options: Mapping[str, Any],
    iterations: Sequence[Iteration],
    comparisons: Sequence[Comparison],
    *,
    with_rows: bool,
) -> None:
    """Write a tracker; see :meth:`logitwire.tracker.IterationTracker.save`."""
    if not with_rows:
        iterations = [replace(each, logits=None) for each in iterations]
    noted = [
        {
            "text": each.text,
            "num_tokens": len(each.token_ids),
            "has_rows": each.logits is not None,
            "metadata": each.metadata,
        }
        for each in iterations
    ]
    about = {"options": options, "iterations": noted}
    fields = [
        pa.field("iteration", pa.int32(), nullable=False),
        pa.field("position", pa.int32(), nullable=False),
        pa.field("token_id", pa.int32(), nullable=False),
        pa.field("token", pa.utf8(), nullable=False),
        pa.field("previous_position", pa.int32()),
        pa.field("kind", pa.utf8()),
        pa.field("jsd", pa.float64()),
    ]
    held = [each.logits for each in iterations if each.logits is not None]
    if held:
        dtype = np.result_type(*(each.dtype for each in held))
        fields.append(pa.field("logits", pa.list_(pa.from_numpy_dtype(dtype), held[0].shape[1])))
    try:
        schema = pa.schema(fields, metadata={TRACKER_KEY: msgspec.json.encode(about, enc_hook=_plain)})
    except TypeError as error:
        raise ValueError(f"the metadata of an iteration cannot be saved as JSON: {error}") from error
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        # Rows hardly compress, and have no values that come again and again.
        with pq.ParquetWriter(unfinished, schema, compression="NONE", use_dictionary=False) as writer:
            for number, iteration in enumerate(iterations):
                comparison = comparisons[number - 1] if number else None
                for batch in _batches(schema, number, iteration, comparison):
                    writer.write_batch(batch)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is nothing that JSON knows")


def _batches(
    schema: pa.Schema, number: int, iteration: Iteration, comparison: Comparison | None
) -> Iterator[pa.RecordBatch]:
    """Give out the rows of one iteration, each batch to be a row group."""
    num = len(iteration.token_ids)
    compared: list[tuple[int | None, str | None, float | None]] = [(None, None, None)] * num
    if comparison is not None:
        alignment = comparison.alignment
        pairs = zip(alignment.a_positions.tolist(), alignment.kinds, comparison.jsd.tolist(), strict=True)
        for place, pair in zip(alignment.b_positions.tolist(), pairs, strict=True):
            compared[place] = pair
    kind = schema.field("logits").type if "logits" in schema.names else None
    row_bytes = 1 if kind is None else kind.list_size * kind.value_type.bit_width // 8
    step = max(1, GROUP_BYTES // row_bytes)
    for start in range(0, num, step):
        part = slice(start, min(start + step, num))
        previous, kinds, jsd = zip(*compared[part], strict=True)
        columns: list[Any] = [
            [number] * len(jsd),
            range(part.start, part.stop),
            iteration.token_ids[part],
            iteration.tokens[part],
            previous,
            kinds,
            jsd,
        ]
        arrays = [pa.array(values, field.type) for values, field in zip(columns, schema, strict=False)]
        if kind is not None:
            arrays.append(_row_array(iteration, part, kind))
        yield pa.record_batch(arrays, schema=schema)


def _row_array(iteration: Iteration, part: slice, kind: Any) -> pa.Array:
    if iteration.logits is None:
        return pa.nulls(part.stop - part.start, kind)
    rows = np.ascontiguousarray(iteration.logits[part], kind.value_type.to_pandas_dtype())
    return pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), type=kind)


def read(path: Path) -> tuple[dict[str, Any], list[Iteration], list[Comparison]]:
    """Read a tracker's options, iterations and comparisons."""
    try:
        file = pq.ParquetFile(path, memory_map=True)
    except pa.ArrowInvalid as error:
        raise RowFileError(f"{path} is no Parquet: {error}") from error
    metadata = file.schema_arrow.metadata or {}
    if TRACKER_KEY not in metadata:
        raise RowFileError(f"{path} holds no iterations")
    about = msgspec.json.decode(metadata[TRACKER_KEY])
    small = [name for name in file.schema_arrow.names if name != "logits"]
    columns = file.read(columns=small).to_pydict()
    groups = RowGroups(file)
    iterations: list[Iteration] = []
    comparisons: list[Comparison] = []
    start = group = 0
    for number, noted in enumerate(about["iterations"]):
        part = slice(start, start + noted["num_tokens"])
        first_group = group
        while start < part.stop:
            start += groups.length(group)
            group += 1
        rows = groups.rows(range(first_group, group)) if noted["has_rows"] else None
        own = {name: values[part] for name, values in columns.items()}
        iterations.append(Iteration(noted["text"], own["token_id"], own["token"], rows, noted["metadata"]))
        if number:
            comparisons.append(Comparison(*_compared(own["previous_position"], own["kind"], own["jsd"])))
    return about["options"], iterations, comparisons


def _compared(
    previous: Sequence[int | None], kinds: Sequence[str | None], jsd: Sequence[float | None]
) -> tuple[Alignment, Any]:
    places = [place for place, value in enumerate(jsd) if value is not None]
    a_positions = np.array([previous[place] for place in places], np.int64)
    num_same_prefix = sum(kind == "same prefix" for kind in kinds)
    alignment = Alignment(a_positions, np.array(places, np.int64), num_same_prefix)
    return alignment, np.array([jsd[place] for place in places], np.float64)
