"""Captures that are read: answer by answer, as one data set, or only to see whether they are whole."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from logitwire.capture.folder import read_failures, read_manifest, shard_files
from logitwire.capture.records import Answer, CaptureError, Failure, Settings, Shard
from logitwire.files import JoinedFile, RowFile

if TYPE_CHECKING:
    import pyarrow.dataset as ds


class Capture:
    """What a folder holds by now; a capture that still runs may be read too.

    Iterating gives an id and its rows for each answer, and for each choice of it.

    Attributes:
        path: Of the folder.
        settings: Of the capture.
        answers: By id, in the order of the shards: texts, finish reasons, token counts.
        failures: By id, of prompts that the server refused or failed.
    """

    def __init__(self, path: Path, settings: Settings, shards: Sequence[Shard]) -> None:
        """Take what was read; :func:`open_capture` reads it."""
        self.path = path
        self.settings = settings
        self.answers: Mapping[str, Answer] = {each.id: each for shard in shards for each in shard.answers}
        self.failures: Mapping[str, Failure] = read_failures(path)
        self._shards = shards
        self._places = {
            answer.id: (number, place)
            for number, shard in enumerate(shards)
            for place, answer in enumerate(shard.answers)
        }
        # The shard that was used last: answers are mostly read in their order.
        self._opened: tuple[int, JoinedFile] | None = None

    def __len__(self) -> int:
        """Return the number of answers."""
        return len(self.answers)

    def __iter__(self) -> Iterator[tuple[str, RowFile]]:
        for prompt_id, answer in self.answers.items():
            for choice in range(len(answer.texts)):
                yield prompt_id, self.rows(prompt_id, choice=choice if answer.num_rows else None)

    def rows(self, prompt_id: str, *, choice: int | None = None) -> RowFile:
        """Return the rows of one answer; they are read from the shard when they are used.

        Args:
            prompt_id: Whose.
            choice: Which, if it has several.

        Raises:
            KeyError: There is no such answer.
            OSError: The shard cannot be read.
            RowFileError: The shard is damaged, or the answer has several choices, or not this one.
        """
        number, place = self._places[prompt_id]
        shard = self._shards[number]
        if self._opened is None or self._opened[0] != number:
            lengths = [answer.num_rows for answer in shard.answers]
            self._opened = number, JoinedFile(self.path / shard.file, lengths)
        answer = shard.answers[place]
        response = {
            "id": prompt_id,
            "model": shard.source.model,
            "texts": answer.texts,
            "finish_reasons": answer.finish_reasons,
            "usage": answer.usage,
        }
        return self._opened[1].answer(place, response, choice=choice)

    def dataset(self) -> "ds.Dataset":
        """Return all shards as one data set of pyarrow, for scans that use some of the columns or rows."""
        # Brings half a second of imports along.
        import pyarrow.dataset as ds  # noqa: PLC0415

        paths = [str(self.path / shard.file) for shard in self._shards]
        return ds.dataset(paths, format="ipc" if self.settings.format == "arrow" else "parquet")


def open_capture(path: str | Path) -> Capture:
    """Return what a capture's folder holds.

    Raises:
        OSError: It cannot be read.
        CaptureError: It is no capture, or its manifest is damaged.
    """
    path = Path(path)
    settings, shards = read_manifest(path)
    if settings is None:
        raise CaptureError(f"{path} holds no capture")
    return Capture(path, settings, shards)


def check_capture(path: str | Path) -> list[str]:
    """Hold a capture's shards against its manifest; return all that is wrong, in words.

    Raises:
        OSError: The folder cannot be read.
        CaptureError: It is no capture, or its manifest is damaged.
    """
    path = Path(path)
    settings, shards = read_manifest(path)
    if settings is None:
        raise CaptureError(f"{path} holds no capture")
    faults = [fault for shard in shards for fault in _faults_of(path, shard, settings)]
    counts = Counter(answer.id for shard in shards for answer in shard.answers)
    faults += [f"{prompt_id!r} is there {num} times" for prompt_id, num in counts.items() if num > 1]
    unrecorded = sorted(set(shard_files(path)) - {shard.file for shard in shards})
    return faults + [f"{name} is not in the manifest; the next run removes it" for name in unrecorded]


def _faults_of(path: Path, shard: Shard, settings: Settings) -> list[str]:
    file = path / shard.file
    if not file.exists():
        return [f"{shard.file} is missing"]
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if digest != shard.sha256:
        return [f"{shard.file} has changed: its checksum is not that of the manifest"]
    ids = _ids(file, settings)
    expected = [answer.id for answer in shard.answers for _ in range(answer.num_rows)]
    if len(ids) != shard.num_rows or ids != expected:
        return [f"{shard.file} holds {len(ids)} rows, and not those that the manifest says"]
    return []


def _ids(file: Path, settings: Settings) -> list[Any]:
    if settings.format == "parquet":
        found: list[Any] = pq.read_table(file, columns=["id"])["id"].to_pylist()
        return found
    reader = pa.ipc.open_file(pa.memory_map(str(file)))
    batches = (reader.get_batch(place) for place in range(reader.num_record_batches))
    return [prompt_id for batch in batches for prompt_id in batch["id"].to_pylist()]
