"""Answers with rows that were saved to a file: Arrow streams, Arrow files and Parquet.

A stream is what the server sends, saved as it came, by ``curl`` for instance. Only its end record shows
that it is whole, so a stream without one is refused. Arrow files and Parquet have a footer that does the
same. Files are mapped into memory: rows are read from the disk when they are used, and not before.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from logitwire.arrow import END_KEY, ERROR_KEY, RESPONSE_KEY
from logitwire.errors import IncompleteStreamError, LogitwireError, api_error
from logitwire.views import ChunkedRows, PickedRows, SlicedRows, shown

ARROW_FILE_MARK = b"ARROW1"
PARQUET_MARK = b"PAR1"
STREAM_MARK = b"\xff\xff\xff\xff"

TRACKER_KEY = b"logitwire.iterations"
"""Schema metadata of a tracker's file, which is another kind of Parquet; see logitwire.tracker_file."""


class RowFileError(LogitwireError, ValueError):
    """The file holds no rows of an answer, or not those that were asked for."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RowFile:
    """The rows of one choice in a file.

    Attributes:
        token_ids: T ids.
        tokens: T token texts; the ids in words, such as ``token_id:5``, if the file has no texts.
        logprobs: float32 (T,), as the server computed them; ``None`` if the file has none.
        logits: (T, V) float16 or float32, sliced like an array; read from the file when they are used.
            ``None`` if the file has none. ``numpy.asarray`` loads them all.
        response: The answer without rows: the end record if there is one, else what the schema says.
        columns: The other columns of these rows, by name.
    """

    token_ids: list[int]
    tokens: list[str]
    logprobs: NDArray[np.float32] | None
    logits: SlicedRows | None
    response: dict[str, Any]
    columns: dict[str, list[Any]]

    def __repr__(self) -> str:
        return f"<RowFile of {len(self.token_ids)} tokens, {shown(self.logits)}>"

    @property
    def text(self) -> str:
        """What the tokens say."""
        return "".join(self.tokens)


def read_rows(path: str | Path, *, choice: int | None = None) -> RowFile:
    """Read an answer from a file of any of the three kinds; the rows of its prompt are left out.

    Args:
        path: An Arrow stream, an Arrow file, or Parquet; its first bytes say which.
        choice: Which choice, or which sequence of a scoring; needed only if there are several.

    Raises:
        OSError: The file cannot be read.
        IncompleteStreamError: A stream broke off.
        RowFileError: It is no such file, or has several choices, or not this one.
    """
    path = Path(path)
    whole = _read(path)
    if len(set(whole.columns.get("id", ()))) > 1:
        raise RowFileError(f"{path} holds the answers of a capture; logitwire.open_capture reads its folder")
    return _pick(path, whole, choice)


class JoinedFile:
    """A file that holds several answers, one behind another."""

    def __init__(self, path: str | Path, lengths: Sequence[int]) -> None:
        """Open it.

        Args:
            path: An Arrow file or Parquet.
            lengths: Rows of each answer, of all its choices and of its prompt.

        Raises:
            OSError: The file cannot be read.
            RowFileError: It is no such file, or has another number of rows.
        """
        self._path = Path(path)
        self._whole = _read(self._path)
        self._ends = list(accumulate(lengths, initial=0))
        num = len(next(iter(self._whole.columns.values()), ()))
        if num != self._ends[-1]:
            raise RowFileError(f"{path} has {num} rows, and should have {self._ends[-1]}")

    def answer(self, place: int, response: dict[str, Any], *, choice: int | None = None) -> RowFile:
        """Return one choice of an answer by its number; see :func:`read_rows`."""
        start, stop = self._ends[place], self._ends[place + 1]
        columns = {name: values[start:stop] for name, values in self._whole.columns.items()}
        rows = None if self._whole.logits is None else PickedRows(self._whole.logits, np.arange(start, stop))
        return _pick(self._path, _Whole(columns, rows, response), choice)


def _read(path: Path) -> "_Whole":
    with path.open("rb") as file:
        mark = file.read(6)
    try:
        if mark == ARROW_FILE_MARK:
            return _read_arrow_file(path)
        if mark.startswith(PARQUET_MARK):
            return _read_parquet(path)
        if mark.startswith(STREAM_MARK):
            return _read_stream(path)
    except (pa.ArrowException, OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RowFileError(f"{path} cannot be read: {error}") from error
    raise RowFileError(f"{path} is no Arrow stream, no Arrow file and no Parquet{_hint(path)}")


def _is_text(kind: pa.DataType) -> bool:
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    is_text: bool = (
        pa.types.is_string(plain) or pa.types.is_large_string(plain) or pa.types.is_string_view(plain)
    )
    return is_text


def _is_row(kind: pa.DataType) -> bool:
    has_width = pa.types.is_fixed_size_list(kind) and kind.list_size > 0
    return has_width and kind.value_type in (pa.float16(), pa.float32())


@dataclass(frozen=True, slots=True)
class _Whole:
    """All rows of a file."""

    columns: dict[str, list[Any]]
    logits: SlicedRows | None
    response: dict[str, Any]


def _read_stream(path: Path) -> _Whole:
    batches: list[pa.RecordBatch] = []
    end: dict[str, Any] | None = None
    try:
        reader = pa.ipc.open_stream(pa.memory_map(str(path)))
        for batch, custom_metadata in _with_metadata(reader):
            if ERROR_KEY in custom_metadata:
                said = api_error(None, custom_metadata[ERROR_KEY], {}, None)
                raise IncompleteStreamError(f"{path}: the server failed in the middle: {said}")
            if END_KEY in custom_metadata:
                end = _object(custom_metadata[END_KEY])
            batches.append(batch)
    except (OSError, pa.ArrowInvalid) as error:
        raise IncompleteStreamError(f"{path} breaks off in the middle of a message") from error
    num = sum(map(len, batches))
    if end is None:
        raise IncompleteStreamError(f"{path} breaks off after {num} rows: it has no end record")
    counts = end.get("rows")
    if not isinstance(counts, list) or sum(each for each in counts if isinstance(each, int)) != num:
        raise IncompleteStreamError(f"{path} has {num} rows, but its end record says {counts}")
    return _whole(path, reader.schema, batches, end)


def _with_metadata(reader: Any) -> Iterator[tuple[pa.RecordBatch, dict[bytes, bytes]]]:
    while True:
        try:
            batch, custom_metadata = reader.read_next_batch_with_custom_metadata()
        except StopIteration:
            return
        yield batch, dict(custom_metadata or {})


def _read_arrow_file(path: Path) -> _Whole:
    reader = pa.ipc.open_file(pa.memory_map(str(path)))
    read = [reader.get_batch_with_custom_metadata(place) for place in range(reader.num_record_batches)]
    ends = [metadata[END_KEY] for _, metadata in read if metadata and END_KEY in metadata]
    return _whole(path, reader.schema, [batch for batch, _ in read], _object(ends[-1]) if ends else None)


def _read_parquet(path: Path) -> _Whole:
    file = pq.ParquetFile(path, memory_map=True)
    schema = file.schema_arrow
    if TRACKER_KEY in (schema.metadata or {}):
        raise RowFileError(f"{path} holds the iterations of a loop; IterationTracker.load reads it")
    _check(path, schema)
    small = [name for name in schema.names if name != "logits"]
    rows = RowGroups(file).rows(range(file.metadata.num_row_groups))
    return _Whole(file.read(columns=small).to_pydict(), rows, _response(schema))


class RowGroups:
    """The rows in the groups of a Parquet file; the two groups that were used last are in memory."""

    def __init__(self, file: pq.ParquetFile) -> None:
        self._file = file
        # Two, since two answers of one file may be compared in step.
        self._load = functools.lru_cache(2)(self._read)

    def rows(self, groups: range) -> ChunkedRows | None:
        """Return the column ``logits`` of some groups, if there is one."""
        if "logits" not in self._file.schema_arrow.names:
            return None
        kind = self._file.schema_arrow.field("logits").type
        lengths = [self.length(group) for group in groups]
        dtype = kind.value_type.to_pandas_dtype()
        return ChunkedRows(lambda place: self._load(groups[place]), lengths, kind.list_size, dtype)

    def length(self, group: int) -> int:
        """Return how many rows a group has."""
        num: int = self._file.metadata.row_group(group).num_rows
        return num

    def _read(self, group: int) -> NDArray[Any]:
        column = self._file.read_row_group(group, columns=["logits"])["logits"].combine_chunks()
        return _values(column, column.type.list_size)


def _whole(
    path: Path, schema: pa.Schema, batches: Sequence[pa.RecordBatch], end: dict[str, Any] | None
) -> _Whole:
    _check(path, schema)
    small = [name for name in schema.names if name != "logits"]
    columns: dict[str, list[Any]] = {name: [] for name in small}
    for batch in batches:
        # Unchecked offsets would be read wherever they point. The rows themselves are not read by this.
        batch.validate(full=True)
        for name in small:
            columns[name] += batch[name].to_pylist()
    rows = None
    if "logits" in schema.names:
        kind = schema.field("logits").type
        filled = [batch for batch in batches if len(batch)]
        rows = ChunkedRows(
            lambda place: _values(filled[place]["logits"], kind.list_size),
            [len(batch) for batch in filled],
            kind.list_size,
            kind.value_type.to_pandas_dtype(),
        )
    return _Whole(columns, rows, _response(schema) if end is None else end)


def _values(column: Any, width: int) -> NDArray[Any]:
    """Return the rows (k, V) of a column without copying them."""
    if column.null_count:
        raise RowFileError("some logits are null")
    rows: NDArray[Any] = column.flatten().to_numpy(zero_copy_only=True).reshape(-1, width)
    return rows


def _response(schema: pa.Schema) -> dict[str, Any]:
    return _object((schema.metadata or {}).get(RESPONSE_KEY, b"{}"))


def _object(encoded: bytes) -> dict[str, Any]:
    return msgspec.json.decode(encoded, type=dict[str, Any])


_KINDS: dict[str, Callable[[pa.DataType], bool]] = {
    "choice": pa.types.is_integer,
    "token_id": pa.types.is_integer,
    "token": _is_text,
    "segment": _is_text,
    "logprob": pa.types.is_floating,
    "logits": _is_row,
}
"""What the columns must be that are used here."""


def _check(path: Path, schema: pa.Schema) -> None:
    for field in schema:
        if field.name in _KINDS and not _KINDS[field.name](field.type):
            raise RowFileError(f"{path} has a column {field.name} of {field.type}, unlike the wire's")


def _pick(path: Path, whole: _Whole, choice: int | None) -> RowFile:
    """Return the rows of one choice, in the order of their positions."""
    columns = whole.columns
    if "token_id" not in columns:
        raise RowFileError(f"{path} has no column token_id; it has {', '.join(columns) or 'none'}")
    num = len(columns["token_id"])
    for name in _KINDS.keys() & columns.keys():
        if None in columns[name]:
            raise RowFileError(f"{path} has nulls in its column {name}")
    is_scoring = whole.response.get("object") == "logits"
    segments = columns.get("segment") or [""] * num
    choices = columns.get("choice") or [0] * num
    there = sorted(set(choices))
    if choice is None:
        if len(there) > 1:
            raise RowFileError(f"{path} has the choices {', '.join(map(str, there))}; name one")
        choice = there[0] if there else 0
    elif num and choice not in there:
        raise RowFileError(f"{path} has no choice {choice}; it has {', '.join(map(str, there))}")
    places = [
        place
        for place in range(num)
        if choices[place] == choice and (is_scoring or segments[place] != "prompt")
    ]
    own = {name: [values[place] for place in places] for name, values in columns.items()}
    rows: SlicedRows | None = whole.logits
    if whole.logits is not None and len(places) < num:
        rows = PickedRows(whole.logits, places)
    return RowFile(
        token_ids=own["token_id"],
        tokens=own.get("token") or [f"token_id:{token_id}" for token_id in own["token_id"]],
        logprobs=np.asarray(own["logprob"], np.float32) if "logprob" in own else None,
        logits=rows,
        response=whole.response,
        columns=own,
    )


def _hint(path: Path) -> str:
    """Return what a file that begins like JSON probably is."""
    with path.open("rb") as file:
        begins = file.read(200)
    if not begins:
        return "; it is empty"
    if begins.lstrip().startswith(b"{"):
        return f"; it is JSON, perhaps a refusal: {begins.decode(errors='replace')!r}"
    return ""
