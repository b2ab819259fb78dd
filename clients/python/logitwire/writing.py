"""Files of rows that are written while the rows come, and take their name only when they are whole.

A file is written under another name beside its own, brought to the disk, and renamed. So whatever has the
name is whole, also after a crash.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from logitwire.arrow import END_KEY
from logitwire.results import Columns, Received, Row

Format: TypeAlias = Literal["arrow", "stream", "parquet"]
"""An Arrow file, an Arrow stream as the server sends it, or Parquet."""

FORMATS: dict[str, Format] = {
    ".arrow": "arrow",
    ".feather": "arrow",
    ".arrows": "stream",
    ".stream": "stream",
    ".parquet": "parquet",
}
"""By the suffix of a path."""

BLOCK_BYTES = 8 * 2**20
"""Bytes of rows in one record batch or row group."""

UNFINISHED = ".unfinished"
"""Suffix of what is being written."""


def format_of(path: str | Path) -> Format:
    """Return the format that a path asks for by its suffix.

    Raises:
        ValueError: It asks for none of them.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in FORMATS:
        raise ValueError(f"{path}: rows are saved as {', '.join(FORMATS)}")
    return FORMATS[suffix]


class Block:
    """Rows that wait to be written together.

    Attributes:
        num_bytes: Of their logits.
    """

    def __init__(self, schema: pa.Schema) -> None:
        """Begin without rows of a schema of the wire."""
        self._schema = schema
        self._rows: list[Row] = []
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, row: Row) -> None:
        """Add a row; its memory is held until :meth:`take`."""
        self._rows.append(row)
        self.num_bytes += 0 if row.logits is None else row.logits.nbytes

    def take(self) -> pa.RecordBatch:
        """Return the rows as one batch, and begin anew."""
        rows, self._rows, self.num_bytes = self._rows, [], 0
        columns: Columns = {
            name: [row.columns[name] if name in row.columns else getattr(row, name) for row in rows]
            for name in self._schema.names
            if name != "logits"
        }
        logits = None
        if "logits" in self._schema.names:
            logits = np.stack([row.logits for row in rows if row.logits is not None])  # (k, V)
        (batch,) = Received(self._schema, columns, logits).to_arrow().to_batches()
        return batch


class TableFile:
    """One file that is being written. Leaving its ``with`` block before :meth:`finish` removes it.

    Attributes:
        path: Its name once it is whole.
        num_rows: Written so far.
        num_bytes: Written so far, before any footer.
    """

    def __init__(self, path: str | Path, schema: pa.Schema, kind: Format) -> None:
        """Begin.

        Raises:
            OSError: It cannot be written there.
        """
        self.path = Path(path)
        self.num_rows = self.num_bytes = 0
        self._unfinished = self.path.with_name(f".{self.path.name}.{os.getpid()}{UNFINISHED}")
        self._file = self._unfinished.open("wb")
        try:
            if kind == "parquet":
                # Rows hardly compress, and have no values that come again and again. To find their least and
                # largest would cost as much as to write them.
                self._writer: Any = pq.ParquetWriter(
                    self._file,
                    schema,
                    compression="NONE",
                    use_dictionary=False,
                    write_statistics=[name for name in schema.names if name != "logits"],
                )
            else:
                new = pa.ipc.new_file if kind == "arrow" else pa.ipc.new_stream
                self._writer = new(self._file, schema)
        except BaseException:
            self._discard()
            raise
        self._schema = schema
        self._kind = kind

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._file.closed:
            # What is written on closing goes where nobody looks; a full disk is reported by what came before.
            with suppress(OSError, pa.ArrowException):
                self._writer.close()
            self._discard()

    def write(self, batch: pa.RecordBatch) -> None:
        """Write some rows.

        Raises:
            OSError: The disk is full, for instance.
        """
        self._writer.write_batch(batch)
        self.num_rows += len(batch)
        self.num_bytes += batch.nbytes

    def finish(self, end: Mapping[str, Any] | None = None) -> None:
        """End the file, bring it to the disk, and give it its name.

        Args:
            end: The answer without rows, which an Arrow file or stream can hold.

        Raises:
            OSError: The disk is full, for instance. The file is then removed.
        """
        try:
            if end is not None and self._kind != "parquet":
                empty = pa.RecordBatch.from_pylist([], schema=self._schema)
                self._writer.write_batch(empty, custom_metadata={END_KEY: msgspec.json.encode(end)})
            self._writer.close()
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._unfinished.replace(self.path)
        finally:
            self._discard()
        sync_folder(self.path.parent)

    def _discard(self) -> None:
        with suppress(OSError):
            self._file.close()
        self._unfinished.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
