"""Rows on their way to a shard: an answer waits aside until it is whole, and then goes into one file."""

import hashlib
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np
import pyarrow as pa

from logitwire.arrow import RESPONSE_KEY
from logitwire.calls import NAMED_COLUMNS
from logitwire.capture.folder import Folder
from logitwire.capture.records import Answer, Shard, Source
from logitwire.results import Columns, Received, Row
from logitwire.writing import BLOCK_BYTES, TableFile

MAX_SPOOL_BYTES = 8 * 2**20
"""Of an answer's rows in memory; longer ones go to a file without a name, which ends with the process."""

MAX_AGE_S = 300.0
"""Seconds after which a shard is ended with the next answer: what a kill can cost at most."""


class Spool:
    """The rows of an answer that is not whole yet.

    Attributes:
        num_rows: So far.
        num_bytes: Of logits so far.
    """

    def __init__(self, folder: Path) -> None:
        """Begin without rows.

        Args:
            folder: Where long answers go.
        """
        self._file = tempfile.SpooledTemporaryFile(MAX_SPOOL_BYTES, dir=str(folder))  # noqa: SIM115 - see close
        self._columns: Columns = {}
        self.num_rows = self.num_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, row: Row) -> None:
        """Take a row.

        Raises:
            OSError: The disk is full, for instance.
        """
        for name in NAMED_COLUMNS:
            self._columns.setdefault(name, []).append(getattr(row, name))
        for name, value in row.columns.items():
            self._columns.setdefault(name, []).append(value)
        self.num_rows += 1
        if row.logits is not None:
            self._file.write(row.logits.data)
            self.num_bytes += row.logits.nbytes

    def batches(self, schema: pa.Schema, prompt_id: str) -> Iterator[pa.RecordBatch]:
        """Give out the rows again, as they stand in a shard.

        Args:
            schema: Of the stream.
            prompt_id: For the column ``id``.
        """
        self._file.seek(0)
        kind = schema.field("logits").type if "logits" in schema.names else None
        step = self.num_rows
        if kind is not None:
            dtype = np.dtype(kind.value_type.to_pandas_dtype())
            step = max(1, BLOCK_BYTES // (kind.list_size * dtype.itemsize))
        for start in range(0, self.num_rows, step):
            part = slice(start, min(start + step, self.num_rows))
            num = part.stop - part.start
            logits = None
            if kind is not None:
                logits = np.empty((num, kind.list_size), dtype)
                self._file.readinto(logits.data.cast("B"))
            columns = {name: values[part] for name, values in self._columns.items()}
            table = Received(schema, columns, logits).to_arrow()
            table = table.add_column(0, ID_FIELD, pa.array([prompt_id] * num, pa.utf8()))
            yield from table.to_batches()


ID_FIELD = pa.field("id", pa.utf8(), nullable=False)


def shard_schema(schema: pa.Schema) -> pa.Schema:
    """Return the schema of a shard, given that of a stream: it says what all answers have in common."""
    response: dict[str, Any] = msgspec.json.decode((schema.metadata or {}).get(RESPONSE_KEY, b"{}"))
    common = {name: response[name] for name in ("object", "model", "metadata") if name in response}
    return pa.schema([ID_FIELD, *schema], metadata={RESPONSE_KEY: msgspec.json.encode(common)})


class ShardWriter:
    """Writes answers into one shard after another. Threads may share it."""

    def __init__(self, folder: Folder, max_bytes: int) -> None:
        """Begin without a shard.

        Args:
            folder: Of the capture.
            max_bytes: A shard is ended with the answer that reaches this size.
        """
        self._folder = folder
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._file: TableFile | None = None
        self._answers: list[Answer] = []
        self._source: Source | None = None
        self._begun_s = 0.0

    def add(self, answer: Answer, source: Source, schema: pa.Schema, spool: Spool) -> None:
        """Write a whole answer. It counts once its shard is ended.

        Raises:
            OSError: The disk is full, for instance. The shard is then gone, with its other answers.
        """
        with self._lock:
            if self._file is None:
                path = self._folder.path / self._folder.next_file()
                self._file = TableFile(path, shard_schema(schema), self._folder.settings.format)
                self._source, self._begun_s = source, time.monotonic()
            try:
                for batch in spool.batches(schema, answer.id):
                    self._file.write(batch.replace_schema_metadata(None))
            except BaseException as error:
                self._file.__exit__(type(error), error, None)
                self._file, self._answers = None, []
                raise
            self._answers.append(answer)
            age_s = time.monotonic() - self._begun_s
            if self._file.num_bytes >= self._max_bytes or age_s >= MAX_AGE_S:
                self._end()

    def close(self) -> None:
        """End the last shard, if there is one.

        Raises:
            OSError: The disk is full, for instance.
        """
        with self._lock:
            if self._file is not None:
                self._end()

    def _end(self) -> None:
        file, answers, source = self._file, self._answers, self._source
        assert file is not None
        assert source is not None
        self._file, self._answers = None, []
        file.finish()
        with file.path.open("rb") as written:
            digest = hashlib.file_digest(written, "sha256").hexdigest()
        shard = Shard(
            file=file.path.name,
            num_rows=file.num_rows,
            num_bytes=file.path.stat().st_size,
            sha256=digest,
            source=source,
            answers=answers,
        )
        self._folder.add_shard(shard)
