"""The client's way for single rows, which begins behind HTTP, against pyarrow's own reading."""

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logitwire import APIError, IncompleteStreamError
from logitwire.arrow import END_KEY, ERROR_KEY, Batch, Table, read_stream
from logitwire.http import Body, BrokenAnswerError, Head, Incoming

REFUSALS = (IncompleteStreamError, APIError, BrokenAnswerError)

TOKENS = st.sampled_from(["a", "b", "", "é", "漢字", " the", "\0"])
ROWS = st.tuples(st.integers(0, 1), TOKENS, st.sampled_from([None, None, None, "stop"]))


@dataclass(frozen=True)
class Stream:
    """A stream, and what it holds."""

    data: bytes
    table: pa.Table
    rows: np.ndarray[Any, Any]


def written(
    batches: Sequence[Sequence[Any]],
    width: int,
    compressions: Sequence[str | None] = (None,),
    record: tuple[bytes, Any] | None = None,
) -> Stream:
    """Return a stream of batches of (choice, token, finish reason), compressed by turns."""
    schema = pa.schema(
        [
            ("choice", pa.int32()),
            ("token_id", pa.int32()),
            ("token", pa.utf8()),
            ("token_bytes", pa.binary()),
            ("logprob", pa.float32()),
            ("finish_reason", pa.utf8()),
            ("logits", pa.list_(pa.float16(), width)),
        ]
    )
    made, rng = [], np.random.default_rng(0)
    for given_rows in batches:
        num = len(given_rows)
        choices, tokens, reasons = zip(*given_rows, strict=True) if num else ((), (), ())
        logits = rng.standard_normal(num * width).astype(np.float16)
        columns = [
            pa.array(choices, pa.int32()),
            pa.array(rng.integers(-(2**31), 2**31, num), pa.int32()),
            pa.array(tokens, pa.utf8()),
            pa.array([token.encode()[:2] for token in tokens], pa.binary()),
            pa.array(rng.standard_normal(num), pa.float32()),
            pa.array(reasons, pa.utf8()),
            pa.FixedSizeListArray.from_arrays(pa.array(logits), width),
        ]
        made.append(pa.record_batch(columns, schema=schema))
    table = pa.Table.from_batches(made, schema)
    counts = [table["choice"].to_pylist().count(choice) for choice in (0, 1)]
    end = pa.RecordBatch.from_pylist([], schema=schema)
    key, content = record or (END_KEY, {"rows": counts})
    pieces = [(batch, {}) for batch in made] + [(end, {key: json.dumps(content)})]
    data = _messages(schema, [], None)[0]
    for place, piece in enumerate(pieces):
        data += _messages(schema, [piece], compressions[place % len(compressions)])[1]
    whole = table["logits"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
    return Stream(data + b"\xff\xff\xff\xff\0\0\0\0", table, whole.reshape(-1, width))


def _messages(schema: pa.Schema, pieces: Any, compression: str | None) -> tuple[bytes, bytes]:
    """Return the bytes of a schema, and those of the batches behind it."""
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        # The schema is written with the first batch, or at the end.
        for batch, metadata in pieces:
            writer.write_batch(batch, custom_metadata=metadata or None)
    begin = sink.getvalue().index(b"\xff\xff\xff\xff", 1)
    return sink.getvalue()[:begin], sink.getvalue()[begin:-8]


def chunked(data: bytes, cuts: Sequence[int]) -> bytes:
    ends = sorted({min(cut, len(data)) for cut in cuts if cut} | {len(data)})
    pieces = [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def read(
    raw: bytes,
    headers: dict[str, str],
    *,
    steps: Sequence[int] = (10**6,),
    keeps: bool = True,
    gives: bool = False,
    max_rows: int | None = None,
) -> tuple[Table, list[Any]]:
    """Return what is read, and the rows given out meanwhile; what lies behind a row is received with it."""
    incoming = Incoming()
    body = Body(incoming, Head(200, headers, is_http_1_1=True))
    reading = read_stream(body, [max_rows] * 2, keeps=keeps, gives=gives)
    at, turn, given_rows, answer = 0, 0, [], None
    while True:
        try:
            item = reading.send(answer)
        except StopIteration as stop:
            return stop.value, given_rows
        if isinstance(item, Batch):
            assert item.places is not None
            logits = [row.copy() for place in item.places for row in place]
            given_rows += zip(item.columns["token"], item.columns["choice"], logits, strict=True)
            answer = None
            continue
        spare = incoming.view if item.obj is not incoming.view.obj else memoryview(bytearray())
        piece = raw[at : at + min(steps[turn % len(steps)], len(item) + len(spare))]
        behind = piece[len(item) :]
        item[: len(piece) - len(behind)], spare[: len(behind)] = piece[: len(item)], behind
        at, turn, answer = at + len(piece), turn + 1, len(piece)


HOW = st.fixed_dictionaries(
    {
        "steps": st.lists(st.sampled_from([1, 100, 8192, 10**6]), min_size=1, max_size=4),
        "keeps": st.booleans(),
        "max_rows": st.sampled_from([None, 0, 1, 3, 100]),
    }
)
ONE_OR_MORE = st.one_of(st.lists(ROWS, min_size=1, max_size=1), st.lists(ROWS, max_size=5))


@settings(deadline=None)
@given(
    batches=st.lists(ONE_OR_MORE, max_size=12),
    width=st.sampled_from([1, 3, 32, 4096, 5000]),
    compressions=st.sampled_from([(None,), (None,), ("lz4",), (None, None, "zstd")]),
    cuts=st.none() | st.lists(st.integers(0, 10**5), max_size=6),
    how=HOW,
)
def test_any_stream_is_read_as_pyarrow_reads_it(
    batches: Any, width: int, compressions: Any, cuts: Any, how: Any
) -> None:
    stream = written(batches, width, compressions)
    raw, headers = stream.data, {"content-length": str(len(stream.data))}
    if cuts is not None:
        raw, headers = chunked(stream.data, cuts), {"transfer-encoding": "chunked"}
    table, given_rows = read(raw, headers, gives=True, **how)
    theirs = stream.table.drop_columns("logits").to_pydict()
    assert table.columns == theirs
    assert [each[:2] for each in given_rows] == list(zip(theirs["token"], theirs["choice"], strict=True))
    for (*_, logits), expected in zip(given_rows, stream.rows, strict=True):
        np.testing.assert_array_equal(logits, expected)
    if how["keeps"]:
        assert table.parts is not None
        for choice, rows in enumerate(table.parts):
            of_choice = np.asarray(theirs["choice"], int) == choice
            np.testing.assert_array_equal(rows, stream.rows[of_choice])


SAME = [[(0, "a", None)], [(1, "b", None)]] * 4


def test_an_array_may_grow_between_two_runs_of_one_batch() -> None:
    stream = written([[(0, "a", None)], [(0, "b", None), (1, "c", None), (0, "d", None)]], 4)
    table, _ = read(stream.data, {}, max_rows=1)
    assert table.parts is not None
    np.testing.assert_array_equal(table.parts[0], stream.rows[[0, 1, 3]])


def test_a_stream_of_like_rows_that_is_cut_is_never_read() -> None:
    raw = chunked(written(SAME, 32).data, [500, 3000, 3001])
    for length in range(len(raw)):
        with pytest.raises(REFUSALS):
            read(raw[:length], {"transfer-encoding": "chunked"})


def test_a_failure_behind_like_rows_is_raised() -> None:
    stream = written(SAME, 32, record=(ERROR_KEY, {"error": {"message": "no memory"}}))
    with pytest.raises(APIError, match="no memory"):
        read(stream.data, {})


def test_a_string_outside_of_its_column_is_refused() -> None:
    data = bytearray(written(SAME, 32).data)
    # The offsets 0 and 1 of the last row's token, in a body that begins with choice and token id.
    last = data.rindex(b"b", 0, data.rindex(END_KEY))
    at = data.rindex(b"\0\0\0\0\x01\0\0\0", 0, data.rindex(b"b", 0, last))
    for wrong in (b"\x02\0\0\0\x01\0\0\0", b"\xff\xff\xff\xff\x01\0\0\0", b"\0\0\0\0\x09\0\0\0"):
        data[at : at + 8] = wrong
        with pytest.raises(REFUSALS, match="cannot be read"):
            read(bytes(data), {})


@pytest.mark.parametrize("compression", [None, "lz4"])
@pytest.mark.parametrize("rows", [[None], [[1.0, 2.0], None], [[1.0, None]]])
def test_logits_that_are_null_are_refused(rows: Any, compression: str | None) -> None:
    schema = pa.schema([("choice", pa.int32()), ("logits", pa.list_(pa.float32(), 2))])
    columns = [pa.array([0] * len(rows), pa.int32()), pa.array(rows, schema.field("logits").type)]
    begin, batch = _messages(schema, [(pa.record_batch(columns, schema=schema), {})], compression)
    with pytest.raises(IncompleteStreamError, match="null"):
        read(begin + batch, {})


def test_columns_that_the_wire_does_not_have_are_refused() -> None:
    words = pa.array(["a"]).dictionary_encode()
    schema = pa.schema([("choice", pa.int32()), ("word", words.type)])
    batch = pa.record_batch([pa.array([0], pa.int32()), words], schema=schema)
    begin, rest = _messages(schema, [(batch, {})], None)
    with pytest.raises(IncompleteStreamError, match="cannot be read"):
        read(begin + rest, {})
