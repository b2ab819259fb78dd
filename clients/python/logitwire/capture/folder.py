"""A capture's folder: its lock, its records, and what a kill left in it."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from logitwire.capture.prompts import Prompt
from logitwire.capture.records import Answer, CaptureError, Failure, Settings, Shard, Source
from logitwire.writing import UNFINISHED, sync_folder

MANIFEST, FAILURES, LOCK = "manifest.jsonl", "failures.jsonl", "lock"

Record = TypeVar("Record")


def shard_files(folder: Path) -> list[str]:
    """Return the names of all shards in a folder, recorded or not, those that are being written too."""
    return [
        path.name
        for path in sorted(folder.iterdir())
        if path.name.startswith("shard-")
        or (path.name.startswith(".shard-") and path.name.endswith(UNFINISHED))
    ]


def read_manifest(folder: Path) -> tuple[Settings | None, list[Shard]]:
    """Read the settings and the shards of a capture; a half-written last line does not count.

    Raises:
        CaptureError: Another line is damaged.
    """
    records: list[Any] = _read_lines(folder / MANIFEST, Settings | Shard)
    if not records:
        return None, []
    settings, *rest = records
    shards = [each for each in rest if isinstance(each, Shard)]
    if not isinstance(settings, Settings) or len(shards) < len(rest):
        raise CaptureError(f"{folder / MANIFEST} is damaged: its first line, and only that, is the settings")
    return settings, shards


def read_failures(folder: Path) -> dict[str, Failure]:
    """Read the failures of a capture by their ids; later ones go before earlier ones."""
    records: list[Failure] = _read_lines(folder / FAILURES, Failure)
    return {each.id: each for each in records}


class Folder:
    """The folder of a capture that runs.

    Attributes:
        path: Of the folder.
        settings: Of the capture.
        shards: Those that are recorded.
        failures: By id.
    """

    def __init__(
        self, path: Path, settings: Settings, shards: list[Shard], failures: dict[str, Failure]
    ) -> None:
        """Take what was read; :meth:`open` reads it."""
        self.path = path
        self.settings = settings
        self.shards = shards
        self.failures = failures

    @classmethod
    @contextmanager
    def open(cls, path: Path, settings: Settings) -> Iterator["Folder"]:
        """Make or enter a folder, keep others out of it, and remove what a kill has left half-written.

        Raises:
            OSError: It cannot be made or written.
            CaptureError: Another capture is at work in it, it was begun with other settings, it is damaged,
                or it holds something else.
        """
        path.mkdir(parents=True, exist_ok=True)
        with _locked(path / LOCK):
            begun, shards = read_manifest(path)
            if begun is None and (others := [each for each in os.listdir(path) if each != LOCK]):
                known = {MANIFEST, *shard_files(path)}
                if strangers := sorted(set(others) - known):
                    raise CaptureError(f"{path} is no capture: it holds {strangers[0]}")
            failures = read_failures(path)
            if begun is not None and not shards and not failures:
                # Nothing depends on its settings yet.
                (path / MANIFEST).unlink()
                begun = None
            if begun is not None and (difference := begun.difference(settings)):
                raise CaptureError(f"{path} was begun with other settings: {difference}; use another folder")
            _cut_half_line(path / MANIFEST)
            _cut_half_line(path / FAILURES)
            recorded = {shard.file for shard in shards}
            there = shard_files(path)
            if missing := sorted(recorded - set(there)):
                raise CaptureError(f"{path} is damaged: {missing[0]} is missing")
            for name in sorted(set(there) - recorded):
                (path / name).unlink()
            if begun is None:
                _append(path / MANIFEST, settings)
            yield cls(path, settings, shards, failures)

    @property
    def source(self) -> Source | None:
        """Return whose rows are there already, if any are."""
        return self.shards[0].source if self.shards else None

    def answers(self) -> dict[str, Answer]:
        """Return all answers by their ids."""
        return {answer.id: answer for shard in self.shards for answer in shard.answers}

    def pending(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Return the prompts that have neither an answer nor a failure.

        Raises:
            CaptureError: A prompt that was answered has changed, or is gone.
        """
        given = {prompt.id: prompt for prompt in prompts}
        over = {each.id: each.digest for each in self.answers().values()}
        over |= {each.id: each.digest for each in self.failures.values()}
        for prompt_id, digest in over.items():
            if prompt_id not in given:
                raise CaptureError(f"the prompts have changed: {prompt_id!r} is done, and no longer there")
            if given[prompt_id].digest != digest:
                raise CaptureError(f"the prompts have changed: {prompt_id!r} is done, and is another one now")
        return [prompt for prompt in prompts if prompt.id not in over]

    def add_shard(self, shard: Shard) -> None:
        """Record a shard that is on the disk; from now on its answers count."""
        _append(self.path / MANIFEST, shard)
        self.shards.append(shard)

    def add_failure(self, failure: Failure) -> None:
        """Record a failure."""
        _append(self.path / FAILURES, failure)
        self.failures[failure.id] = failure

    def forget_failures(self) -> None:
        """Make prompts that failed pending again."""
        (self.path / FAILURES).unlink(missing_ok=True)
        sync_folder(self.path)
        self.failures.clear()

    def next_file(self) -> str:
        """Return the name of the next shard."""
        return f"shard-{len(self.shards):05}.{self.settings.format}"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    # Windows has no such module; everything but captures works there.
    import fcntl  # noqa: PLC0415

    with path.open("w") as file:
        try:
            # Ends with the process, however that ends.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CaptureError(f"another capture is at work in {path.parent}") from error
        yield


def _append(path: Path, record: msgspec.Struct) -> None:
    """Write a line, and bring it to the disk."""
    is_new = not path.exists()
    with path.open("ab") as file:
        file.write(msgspec.json.encode(record) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    if is_new:
        sync_folder(path.parent)


def _read_lines(path: Path, kind: Any) -> list[Any]:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    whole, _, _ = content.rpartition(b"\n")
    found = []
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            found.append(msgspec.json.decode(line, type=kind))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CaptureError(f"{path}, line {number}, is damaged: {error}") from error
    return found


def _cut_half_line(path: Path) -> None:
    """Remove a line that a kill has cut, so that the next one does not continue it."""
    if path.exists():
        with path.open("r+b") as file:
            content = file.read()
            file.truncate(content.rfind(b"\n") + 1)
