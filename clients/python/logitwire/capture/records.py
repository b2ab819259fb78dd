"""What a capture writes down beside its rows, and what it can be refused for."""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import msgspec
import pyarrow as pa

from logitwire.errors import APIError, LogitwireError
from logitwire.results import Generation

ShardFormat: TypeAlias = Literal["arrow", "parquet"]


class CaptureError(LogitwireError, ValueError):
    """The prompts, the settings or the folder are not what a capture can work with."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, tag="settings", tag_field="kind"):
    """What must be the same whenever a capture goes on.

    Attributes:
        format: Of the shards.
        logits: Type of the rows.
        raw: Whether texts are continued as they are, without a chat template.
        system: System message of texts, if any.
        fields: Of all requests.
    """

    format: ShardFormat
    logits: Literal["float16", "float32"]
    raw: bool
    system: str | None
    fields: dict[str, Any]

    def difference(self, other: "Settings") -> str | None:
        """Return in words what is not the same; ``None`` if all is."""
        for name in self.__struct_fields__:
            one, two = getattr(self, name), getattr(other, name)
            if name == "fields":
                for field in sorted(one.keys() | two.keys()):
                    if one.get(field) != two.get(field):
                        return f"{field} was {one.get(field)!r}, and is {two.get(field)!r} now"
            elif one != two:
                return f"{name} was {one!r}, and is {two!r} now"
        return None


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Whose rows they are.

    Attributes:
        model: By its name at the server.
        vocab_size: V.
        source_dtype: Of the model's own logits.
        wire_dtype: Of the rows.
        columns: Names and types of the table's columns.
    """

    model: str
    vocab_size: int
    source_dtype: str
    wire_dtype: str | None
    columns: list[str]

    @classmethod
    def of(cls, result: Generation, schema: pa.Schema) -> "Source":
        """Return the source of an answer."""
        metadata = result.metadata
        return cls(
            model=result.response["model"],
            vocab_size=metadata["vocab_size"],
            source_dtype=metadata["source_dtype"],
            wire_dtype=metadata.get("wire_dtype"),
            columns=[f"{each.name}: {each.type}" for each in schema],
        )

    def difference(self, other: "Source") -> str | None:
        """Return in words what is not the same; ``None`` if all is."""
        for name in self.__struct_fields__:
            one, two = getattr(self, name), getattr(other, name)
            if one != two:
                return f"{name} was {one!r}, and is {two!r} now"
        return None


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one prompt.

    Attributes:
        id: Of the prompt.
        digest: Of the prompt.
        num_rows: Of all choices, those of the prompt included.
        texts: Of each choice.
        finish_reasons: Of each choice.
        usage: Token counts.
    """

    id: str
    digest: str
    num_rows: int
    texts: list[str]
    finish_reasons: list[str]
    usage: dict[str, Any]


class Shard(msgspec.Struct, frozen=True, kw_only=True, tag="shard", tag_field="kind"):
    """One file of rows.

    Attributes:
        file: Its name in the folder.
        num_rows: In it.
        num_bytes: Of the file.
        sha256: Of the file.
        source: Whose rows they are.
        answers: In their order in the file.
    """

    file: str
    num_rows: int
    num_bytes: int
    sha256: str
    source: Source
    answers: Sequence[Answer]


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """What the server said instead of an answer.

    Attributes:
        id: Of the prompt.
        digest: Of the prompt.
        status: HTTP status; ``None`` if the answer had begun.
        code: As in the API, such as ``invalid_value``.
        param: The field at fault.
        message: In words.
        request_id: Names the request in the server's log.
    """

    id: str
    digest: str
    status: int | None
    code: str | None
    param: str | None
    message: str
    request_id: str | None

    @classmethod
    def of(cls, prompt_id: str, digest: str, error: APIError) -> "Failure":
        """Return the record of an error."""
        return cls(
            id=prompt_id,
            digest=digest,
            status=error.status,
            code=error.code,
            param=error.param,
            message=str(error),
            request_id=error.request_id,
        )
