"""Whether a JSON schema is safe to compile: its size, and how deep the compiler would have to go."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from engine.errors import InvalidRequestError

MAX_SCHEMA_CHARS = 200_000
"""Of all schemas of one grammar, as text."""

MAX_SCHEMA_DEPTH = 100
"""Levels of braces and brackets; the library refuses 128."""

MAX_REFERENCE_DEPTH = 1000
"""Levels of a schema and of all that it refers to, added up: the library follows references by recursion."""


def checked_schema(text: str, param: str | None) -> dict[str, Any]:
    """Return a schema that is no danger to compile.

    Raises:
        InvalidRequestError: It is no JSON object, too long, or too deep.
    """
    if len(text) > MAX_SCHEMA_CHARS:
        raise InvalidRequestError(
            f"the schema has {len(text):,} characters, and {MAX_SCHEMA_CHARS:,} are allowed", param
        )
    try:
        schema = json.loads(text)
        json.dumps(schema, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the schema is no JSON: {type(error).__name__}", param) from error
    if not isinstance(schema, dict):
        raise InvalidRequestError("the schema must be an object", param)
    depth = _depth(schema)
    if depth > MAX_SCHEMA_DEPTH:
        raise InvalidRequestError(f"the schema is nested more than {MAX_SCHEMA_DEPTH} levels deep", param)
    total = depth
    for reference in set(_references(schema)):
        target = _target(schema, reference)
        total += 2 + (depth if target is None else _depth(target))
        if total > MAX_REFERENCE_DEPTH:
            raise InvalidRequestError(
                f"the schema and all that it refers to have more than {MAX_REFERENCE_DEPTH} levels together",
                param,
            )
    return schema


def _depth(value: Any) -> int:
    """Return how deep lists and objects are nested; without recursion, which has limits."""
    depth, level = 0, [value]
    while level := [each for each in level if isinstance(each, dict | list)]:
        depth += 1
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    return depth


def _references(value: Any) -> Iterator[str]:
    """Return whatever a schema refers to, and a bit more: a default may look like a reference."""
    if isinstance(value, dict):
        for name in ("$ref", "$dynamicRef", "$recursiveRef"):
            if isinstance(value.get(name), str):
                yield value[name]
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _references(each)


def _target(schema: Mapping[str, Any], reference: str) -> Any:
    """Return what a reference names, or ``None`` if it is no path that leads somewhere."""
    found: Any = schema
    if not reference.startswith("#/"):
        return None
    for name in reference[2:].split("/"):
        found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found
