"""The client's own reader, against streams that pyarrow writes."""

import io
import json
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from logitwire import APIError, IncompleteStreamError
from logitwire.arrow import END_KEY, ERROR_KEY, RESPONSE_KEY, Table, read_table

V = 33  # odd, so that rows do not fill their padding


def stream(
    batches: Sequence[int], *, kind: Any = np.float16, record: tuple[bytes, Any] | None = None
) -> bytes:
    """Return a stream with batches of so many rows; row r holds r."""
    value = pa.float16() if kind is np.float16 else pa.float32()
    schema = pa.schema(
        [
            ("choice", pa.int32()),
            ("token_id", pa.int32()),
            ("token", pa.utf8()),
            ("finish_reason", pa.utf8()),
            ("logits", pa.list_(value, V)),
        ],
        metadata={RESPONSE_KEY: b'{"id": "x"}'},
    )
    sink = io.BytesIO()
    total = 0
    with pa.ipc.new_stream(sink, schema) as writer:
        for num in batches:
            numbers = range(total, total + num)
            rows = np.repeat(np.arange(total, total + num), V).astype(kind)
            columns = [
                pa.array([0] * num, pa.int32()),
                pa.array(numbers, pa.int32()),
                pa.array(["é" * (each % 5) for each in numbers]),
                pa.array([None if each % 2 else "stop" for each in numbers], pa.utf8()),
                pa.FixedSizeListArray.from_arrays(pa.array(rows), V),
            ]
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
            total += num
        key, content = record or (END_KEY, {"rows": [total]})
        writer.write_batch(
            pa.RecordBatch.from_pylist([], schema=schema), custom_metadata={key: json.dumps(content)}
        )
    return sink.getvalue()


def read(data: bytes, **options: Any) -> Table:
    return read_table(io.BytesIO(data).readinto, **options)


@pytest.mark.parametrize("kind", [np.float16, np.float32])
@pytest.mark.parametrize("batches", [[], [1], [1, 1, 1], [3, 1, 2], [200]])
@pytest.mark.parametrize("max_rows", [None, 300])
def test_a_whole_stream_is_read_as_pyarrow_reads_it(
    batches: list[int], kind: Any, max_rows: int | None
) -> None:
    data = stream(batches, kind=kind)
    table = read(data, max_rows=max_rows)
    theirs = pa.ipc.open_stream(data).read_all()
    for name in ("token_id", "token", "finish_reason"):
        assert table.columns[name] == theirs[name].to_pylist()
    assert table.logits is not None
    assert table.logits.dtype == kind
    assert table.logits.shape == (sum(batches), V)
    expected = [[number] * V for number in range(sum(batches))]
    np.testing.assert_array_equal(table.logits, np.array(expected).reshape(-1, V))
    assert table.response == {"id": "x"}


def test_rows_are_read_only_and_lie_where_they_were_received() -> None:
    received: list[memoryview] = []
    source = io.BytesIO(stream([1, 2]))

    def readinto(buffer: memoryview) -> int:
        if len(buffer) >= V * 2:
            received.append(buffer)
        return source.readinto(buffer)

    table = read_table(readinto, max_rows=10)
    assert table.logits is not None
    assert not table.logits.flags.writeable
    # Of all buffers that were received into, the rows' own ones lie inside the result.
    inside = [each for each in received if np.shares_memory(np.frombuffer(each, np.uint8), table.logits)]
    assert sum(map(len, inside)) == table.logits.nbytes


def test_a_source_that_gives_single_bytes_is_read_alike() -> None:
    source = io.BytesIO(stream([2]))
    table = read_table(lambda buffer: source.readinto(buffer[:1]))
    assert table.columns["token_id"] == [0, 1]


def test_no_cut_is_ever_taken_for_a_short_result() -> None:
    data = stream([1, 1])
    for length in range(len(data)):
        with pytest.raises(IncompleteStreamError):
            read(data[:length])


def test_a_stream_without_an_end_record_is_incomplete() -> None:
    data = stream([2], record=(b"other", {}))
    pa.ipc.open_stream(data).read_all()
    with pytest.raises(IncompleteStreamError, match="without an end record"):
        read(data)


def test_another_number_of_rows_than_the_end_record_says_is_incomplete() -> None:
    with pytest.raises(IncompleteStreamError, match=r"\[2\] rows came"):
        read(stream([2], record=(END_KEY, {"rows": [3]})))


def test_an_error_record_is_raised_as_the_servers_error() -> None:
    envelope = {"error": {"message": "no memory", "code": "out_of_memory", "param": None}}
    with pytest.raises(APIError, match="no memory") as caught:
        read(stream([1], record=(ERROR_KEY, envelope)), request_id="r1")
    assert (caught.value.code, caught.value.status, caught.value.request_id) == ("out_of_memory", None, "r1")


def test_what_is_no_arrow_stream_is_said_to_be_none() -> None:
    with pytest.raises(IncompleteStreamError):
        read(b'{"error": {"message": "html or so"}}' * 3)
    with pytest.raises(IncompleteStreamError, match="behind the end"):
        read(stream([1]) + b"x")


def choices_stream(
    batches: Sequence[Sequence[int]], rows: Sequence[int], compression: str | None = None
) -> bytes:
    """Return a stream whose batches hold rows of these choices; row r of all holds r, and lists of r % 3."""
    schema = pa.schema(
        [
            ("choice", pa.int32()),
            ("top", pa.list_(pa.float32())),
            ("logits", pa.list_(pa.float16(), V)),
        ]
    )
    sink = io.BytesIO()
    total = 0
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, schema, options=options) as writer:
        for choices in batches:
            numbers = range(total, total + len(choices))
            columns = [
                pa.array(choices, pa.int32()),
                pa.array([[float(each)] * (each % 3) for each in numbers], pa.list_(pa.float32())),
                pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(numbers, V).astype(np.float16)), V),
            ]
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
            total += len(choices)
        writer.write_batch(
            pa.RecordBatch.from_pylist([], schema=schema),
            custom_metadata={END_KEY: json.dumps({"rows": rows})},
        )
    return sink.getvalue()


@pytest.mark.parametrize("compression", [None, "lz4"])
@pytest.mark.parametrize("max_rows_of", [[3, 4, 0], [None, None, None], [1, 1, None]])
def test_rows_of_choices_that_interleave_come_apart(
    compression: str | None, max_rows_of: list[int | None]
) -> None:
    batches = [[0], [1], [0], [1, 1], [0, 1]]
    table = read(choices_stream(batches, [3, 4, 0], compression), max_rows_of=max_rows_of)
    assert table.logits is None
    assert table.parts is not None
    assert [each.shape for each in table.parts] == [(3, V), (4, V), (0, V)]
    assert [each[:, 0].tolist() for each in table.parts] == [[0, 2, 5], [1, 3, 4, 6], []]
    assert [each[:, -1].tolist() for each in table.parts] == [[0, 2, 5], [1, 3, 4, 6], []]
    assert not any(each.flags.writeable for each in table.parts)
    assert table.columns["choice"] == [0, 1, 0, 1, 1, 0, 1]
    assert table.columns["top"] == [[float(each)] * (each % 3) for each in range(7)]


def test_rows_of_another_choice_than_expected_make_no_result() -> None:
    with pytest.raises(IncompleteStreamError, match="choices 0 to 1"):
        read(choices_stream([[0], [2]], [1, 0, 1]), max_rows_of=[1, 1])
    with pytest.raises(IncompleteStreamError, match=r"\[1, 2\] rows came"):
        read(choices_stream([[0], [1, 1]], [2, 1]), max_rows_of=[1, 1])
    with pytest.raises(IncompleteStreamError, match=r"\[1\] rows came"):
        read(choices_stream([[0]], [1, 2]), max_rows_of=[1, 2])
    with pytest.raises(IncompleteStreamError, match="choices 0 to 0"):
        read(choices_stream([[-1]], [1]), max_rows_of=[1])


@pytest.mark.parametrize(
    "data",
    [stream([1, 1]), stream([3]), choices_stream([[0, 1]], [1, 1]), choices_stream([[0, 1]], [1, 1], "lz4")],
    ids=["single rows", "many rows", "lists", "compressed"],
)
def test_a_stream_with_wrong_bytes_is_read_or_refused_and_nothing_else(data: bytes) -> None:
    rng = random.Random(0)
    num_refused = 0
    for _ in range(300):
        changed = bytearray(data)
        for _ in range(rng.choice([1, 1, 3])):
            at = rng.randrange(len(changed))
            changed[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(3))
        try:
            read(bytes(changed), max_rows_of=[1, 1])
        except (IncompleteStreamError, APIError):
            num_refused += 1
    assert num_refused > 100
