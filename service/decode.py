"""Request bodies to structs, by the wire's own rules on JSON, nulls, numbers and names."""

import difflib
import json
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np
from litestar import Request
from litestar.exceptions import InternalServerException

from schemas.base import WireRequest
from schemas.sampling import UNSUPPORTED
from service.errors import MAX_ECHO, MAX_PROBLEMS, Problem, ProblemsError, ServiceError, echo

T = TypeVar("T", bound=WireRequest)

MAX_DEPTH = 100
"""Far below what Python's own recursion, here or in a template, can follow."""

MAX_PARTS = 250_000
"""Lists, objects and keys of a body. Millions hold the interpreter, and so every answer, for seconds."""

PART_MARKS = (b"[", b"{", b":")

_STRANGER = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)
_PATH = re.compile(r" - at `(?:key in )?\$(?P<path>[^`]*)`$")


@dataclass(frozen=True, slots=True)
class Nested:
    """An object in a body, and the names that may stand beside it only."""

    name: str
    beside: frozenset[str]


def check_content_type(content_type: str | None) -> None:
    """Refuse bodies that say that they are no JSON in UTF-8. No type at all is taken as JSON.

    Raises:
        ServiceError: ``unsupported_media_type``.
    """
    media_type, _, parameters = (content_type or "").partition(";")
    if media_type.strip().lower() not in ("", "application/json"):
        raise ServiceError("unsupported_media_type", f"send application/json, not {echo(media_type.strip())}")
    charset = re.search(r"charset=\"?([^\s;\"]+)", parameters, re.IGNORECASE)
    if charset and charset[1].lower() not in ("utf-8", "utf8"):
        raise ServiceError("unsupported_media_type", f"send UTF-8, not {echo(charset[1])}")


async def read_body(request: Request[Any, Any, Any]) -> bytes:
    """Return the whole body.

    Raises:
        ServiceError: ``malformed_json``, if the client leaves before it is all there;
            ``unsupported_media_type``, if it is compressed.
    """
    encoding = request.headers.get("content-encoding", "identity").strip()
    if encoding.lower() not in ("", "identity"):
        raise ServiceError("unsupported_media_type", f"send the body as it is, not as {echo(encoding)}")
    try:
        return await request.body()
    except InternalServerException as error:
        # This is how Litestar reports a client that left; it is no fault of the server.
        raise ServiceError("malformed_json", "the connection closed in the middle of the body") from error


def check_model(asked: str | None, served: str) -> None:
    """Refuse any model but the one that is served; no name at all is taken as that one.

    Raises:
        ServiceError: ``model_not_found``.
    """
    if asked not in (None, served):
        raise ServiceError("model_not_found", f"this server has {served}", "model")


def decode(kind: type[T], body: bytes, *, ignore_unknown: bool, nested: Nested | None = None) -> T:
    """Return the struct that a body states.

    ``null`` means absent. ``5.0`` is a valid int and ``1`` a valid float; strings and booleans are no
    numbers. Integers have 64 bits at most, also where a field may hold anything.

    Args:
        kind: A request.
        body: As it came.
        ignore_unknown: Whether names that nobody knows are passed over.
        nested: An object in the body whose fields count as fields of the body.

    Raises:
        ProblemsError: With every problem found: one per field at most, unknown names included.
        ServiceError: ``request_too_large``, if it has too many parts to be looked at.
    """
    raw = _parse(body)
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    values: dict[str, Any] = {}
    stated, problems = _with_nested(raw, nested)
    for name, path, value in stated:
        field = fields.get(name)
        if value is None and (field is not None or name in UNSUPPORTED):
            continue
        if field is None:
            problems += _stray(name, path, value, fields, ignore_unknown=ignore_unknown)
            if len(problems) > MAX_PROBLEMS:
                # Nobody reads on, and looking for the nearest name takes its time.
                break
            continue
        numbers = _integral(value)
        if not _has_short_integers(numbers):
            problems.append(Problem("invalid_value", "an integer has more than 64 bits", path))
            continue
        try:
            values[field.name] = _converted(numbers, field.type, ignore_unknown=ignore_unknown)
        except msgspec.ValidationError as error:
            problems.append(_invalid(path, error))
    for name, field in fields.items():
        if field.required and raw.get(name) is None:
            problems.append(Problem("invalid_value", "this field is required", name))
    if problems:
        raise ProblemsError(problems)
    return kind(**values)


def nested_path(body: bytes, nested: Nested, param: str | None) -> str | None:
    """Return a field's path as the body states it, which may be inside the nested object."""
    if param is None:
        return None
    inside = msgspec.json.decode(body).get(nested.name)
    name = re.split(r"[.\[]", param)[0]
    return f"{nested.name}.{param}" if isinstance(inside, dict) and name in inside else param


Stated = list[tuple[str, str, Any]]


def _with_nested(raw: dict[str, Any], nested: Nested | None) -> tuple[Stated, list[Problem]]:
    """Return all fields, each with name, path and value, and what is wrong with their places."""
    own = [(name, name, value) for name, value in raw.items() if nested is None or name != nested.name]
    if nested is None or raw.get(nested.name) is None:
        return own, []
    inside = raw[nested.name]
    if not isinstance(inside, dict):
        raise ProblemsError([Problem("invalid_value", "must be an object", nested.name)])
    problems = []
    for name, value in inside.items():
        path = f"{nested.name}.{name}"
        if name in nested.beside:
            problems.append(Problem("invalid_value", f"stands beside {nested.name}", echo(path)))
        elif raw.get(name) is not None:
            problems.append(Problem("invalid_value", "is stated twice", echo(path)))
        else:
            own.append((name, path, value))
    return own, problems


def _converted(value: Any, kind: Any, *, ignore_unknown: bool) -> Any:
    """Return a value as a field's type; if that is wanted, without what nobody knows in an object."""
    while True:
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            found = _STRANGER.fullmatch(str(error))
            if found is None or not ignore_unknown:
                raise
            value = {name: each for name, each in value.items() if name != found["name"]}


def _parse(body: bytes) -> dict[str, Any]:
    if len(body) > MAX_PARTS and num_parts(body) > MAX_PARTS:
        raise ServiceError("request_too_large", f"a body may have {MAX_PARTS:,} lists, objects and keys")
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _malformed(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise _malformed("the body is nested too deeply") from error
    num_keys = _count_keys(raw)
    # Each key has its colon, so equal numbers leave no room for a key that was read and then overwritten.
    if body.count(b":") != num_keys:
        json.loads(body, object_pairs_hook=_refuse_duplicates)
    if not isinstance(raw, dict):
        raise ProblemsError([Problem("invalid_value", "the body must be a JSON object")])
    return raw


def num_parts(body: bytes) -> int:
    """Return how many lists, objects and keys a body has; if it has few brackets, how many at most."""
    most = sum(body.count(mark) for mark in PART_MARKS)
    if most <= MAX_PARTS:
        return most
    # Texts may be full of such marks. A quote behind a backslash ends none.
    data = np.frombuffer(body.replace(rb"\\", b"  ").replace(rb"\"", b"  "), np.uint8)
    is_in_text = np.cumsum(data == ord('"'), dtype=np.uint8) & 1
    return sum(int(np.count_nonzero((data == mark[0]) & (is_in_text == 0))) for mark in PART_MARKS)


def _malformed(message: str) -> ProblemsError:
    return ProblemsError([Problem("malformed_json", message)])


def _count_keys(value: Any) -> int:
    """Return how many keys all objects have together; goes level by level.

    Raises:
        ProblemsError: Lists and objects are nested deeper than ``MAX_DEPTH``.
    """
    num_keys = 0
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        num_keys += sum(len(each) for each in level if isinstance(each, dict))
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
    if level:
        raise _malformed(f"the body is nested more than {MAX_DEPTH} deep")
    return num_keys


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> None:
    """Raise if a key comes twice in one object: readers disagree on which of its values counts."""
    if len(dict(pairs)) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise _malformed(f"the key {echo(counts.most_common(1)[0][0])} comes twice in one object")


def _has_short_integers(value: Any) -> bool:
    """Tell whether every integer has 64 bits at most; no tensor and few readers of JSON hold others."""
    if isinstance(value, str):
        return True
    try:
        # MessagePack knows no longer ones, and this is ten times as fast as a walk.
        msgspec.msgpack.encode(value)
    except OverflowError:
        return False
    return True


def _integral(value: Any) -> Any:
    """Return whole floats as ints, also in lists; msgspec takes an int for a float, but not the reverse."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list) and any(isinstance(each, float | list) for each in value):
        return [_integral(each) for each in value]
    return value


def _stray(
    name: str, path: str, value: Any, fields: dict[str, Any], *, ignore_unknown: bool
) -> list[Problem]:
    """Return what is wrong with a field that the endpoint does not have."""
    if name in UNSUPPORTED:
        if value in UNSUPPORTED[name]:
            return []
        return [Problem("unsupported_parameter", "is not supported", path)]
    return [] if ignore_unknown else [_unknown(name, path, fields)]


def _unknown(name: str, path: str, fields: dict[str, Any]) -> Problem:
    nearest = difflib.get_close_matches(name[:MAX_ECHO], fields, n=1, cutoff=0.3)
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    return Problem("unknown_parameter", f"unknown field{hint}", echo(path))


def _invalid(name: str, error: msgspec.ValidationError) -> Problem:
    message = str(error)
    path = ""
    if found := _PATH.search(message):
        path, message = found["path"], message[: found.start()]
    if found := _STRANGER.fullmatch(message):
        return Problem("unknown_parameter", "unknown field", echo(f"{name}{path}.{found['name']}"))
    return Problem("invalid_value", echo(message), name + path)
