"""Bases of all wire structs, and the number ranges that several requests share."""

from typing import Annotated

import msgspec
from msgspec import Meta


class WireRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request body. A field that is ``None`` is absent, as ``null`` is on the wire.

    ``service.decode`` reads it, since the wire's rules on numbers, nulls and unknown names are its own.
    """


class WireResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A response body. Fields are written in the order in which they stand here."""


def one_of(*names: str, or_null: bool = False) -> Meta:
    """Return the note that a field holds one of several structs, whose union msgspec cannot describe."""
    options: list[dict[str, str]] = [{"$ref": f"#/components/schemas/{name}"} for name in names]
    return Meta(extra_json_schema={"anyOf": [*options, {"type": "null"}] if or_null else options})


Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Temperature = Annotated[float, Meta(ge=0, le=100)]
Probability = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
StopString = Annotated[str, Meta(min_length=1)]
StopStrings = Annotated[list[StopString], Meta(max_length=16)]
