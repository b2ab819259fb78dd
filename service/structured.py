"""What a request says of the shape of its answer: ``response_format``, read into the engine's terms."""

import asyncio
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from engine.engine import Engine
from engine.grammar import Grammar, GrammarSpec, JsonObject, JsonSchema
from service.convert.reading import Reading
from service.errors import Problem, echo

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def read_response_format(
    value: Mapping[str, Any] | None, *, ignore_unknown: bool = False
) -> tuple[GrammarSpec | None, list[Problem]]:
    """Return what an answer must obey, or what is wrong with the field.

    Args:
        value: As it stands in the request.
        ignore_unknown: Whether fields that nobody knows are no problem.

    Returns:
        The grammar to compile, ``None`` where any text will do; and every problem found.
    """
    if value is None:
        return None, []
    kind = value.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        problem = Problem("invalid_value", "must be text, json_object or json_schema", "response_format.type")
        return None, [problem]
    problems = [] if ignore_unknown else _unknown(value, ("type", "json_schema"), "response_format")
    own = value.get("json_schema")
    if kind != "json_schema":
        if own is not None:
            problems.append(
                Problem("invalid_value", f"contradicts type {kind}", "response_format.json_schema")
            )
        return (JsonObject() if kind == "json_object" else None), problems
    if not isinstance(own, dict):
        return None, [*problems, _wrong("", "an object", own)]
    if not ignore_unknown:
        known = ("name", "description", "strict", "schema")
        problems += _unknown(own, known, "response_format.json_schema")
    spec, more = _read_json_schema(own)
    return spec, problems + more


async def compile_format(
    engine: Engine, value: Mapping[str, Any] | None, *, after: str | None = None
) -> Grammar | None:
    """Return the grammar of a ``response_format`` without problems; compiles on a thread.

    Args:
        engine: Compiles.
        value: As it stands in the request.
        after: The text behind which the grammar starts.

    Raises:
        InvalidRequestError: The schema cannot be obeyed.
    """
    spec, _ = read_response_format(value, ignore_unknown=True)
    if spec is None:
        return None
    param = "response_format" if isinstance(spec, JsonObject) else "response_format.json_schema.schema"
    return await asyncio.to_thread(engine.compile_grammar, spec, param, after=after)


async def compile_answer(
    engine: Engine, reading: Reading, response_format: Mapping[str, Any] | None
) -> Grammar | None:
    """Return what an answer must obey: the calls that must come, else the format; compiles on a thread.

    Raises:
        InvalidRequestError: The parameters of a function, or the schema, cannot be obeyed.
    """
    after = reading.reasoning_end
    if (calls := reading.calls()) is not None:
        return await asyncio.to_thread(engine.compile_grammar, calls, "tools", after=after)
    return await compile_format(engine, response_format, after=after)


def _read_json_schema(own: Mapping[str, Any]) -> tuple[GrammarSpec | None, list[Problem]]:
    """Read what stands in ``json_schema``, but for unknown fields."""
    problems = []
    name = own.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        problems.append(_wrong(".name", "1 to 64 letters, digits, underscores and dashes", name))
    if not isinstance(own.get("description"), str | None):
        problems.append(_wrong(".description", "a string", own["description"]))
    if not isinstance(own.get("strict"), bool | None):
        problems.append(_wrong(".strict", "true or false", own["strict"]))
    schema = own.get("schema")
    if not isinstance(schema, dict):
        return None, [*problems, _wrong(".schema", "an object", schema)]
    return JsonSchema(msgspec.json.encode(schema).decode()), problems


def _wrong(name: str, expected: str, value: object) -> Problem:
    """Return a problem of a field of ``json_schema``."""
    missing = "; it is missing" if value is None else ""
    return Problem("invalid_value", f"must be {expected}{missing}", f"response_format.json_schema{name}")


def _unknown(value: Mapping[str, Any], known: tuple[str, ...], path: str) -> list[Problem]:
    """Return a problem for each field that nobody knows."""
    return [
        Problem("unknown_parameter", f"unknown field; known are {', '.join(known)}", f"{path}.{echo(name)}")
        for name in value
        if name not in known
    ]
