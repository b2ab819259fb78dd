"""The simple checks: what a case states of an answer as data.

``status`` (200 if absent) and ``code`` may be lists of what is allowed; ``param`` allows paths below it.
``says`` are texts of the error's message, ``type`` is the media type, ``headers`` are texts that headers
hold, without regard to case. ``body`` is the exact body, ``within_s`` the longest time. ``paths`` are values
of the JSON body: the very value, or an object of ``in``, ``min``, ``max``, ``type``.
"""

from collections.abc import Mapping
from typing import Any

from tests.cases.runner import Answer, at

CHECK_KEYS = frozenset({"status", "code", "param", "says", "type", "headers", "body", "within_s", "paths"})
TYPES = {"int": int, "str": str}


def check_answer(answer: Answer, stated: Mapping[str, Any] | None, model: str) -> None:
    """Assert what a case states of an answer, and that nothing was cut or shaped otherwise."""
    check = dict(stated or {})
    assert set(check) <= CHECK_KEYS
    assert answer.status in _list(check.get("status", 200)), (answer.status, answer.body[:500])
    assert answer.status < 500
    if "within_s" in check:
        assert answer.seconds < check["within_s"]
    if "type" in check:
        assert answer.media_type == check["type"]
    for name, text in check.get("headers", {}).items():
        assert text.lower() in answer.headers[name].lower()
    if "body" in check:
        assert answer.body == check["body"].encode()
    if answer.status >= 400:
        _check_error(answer.error, check)
        return
    for path, wanted in check.get("paths", {}).items():
        _check_value(at(answer.json, path), model if wanted == "MODEL" else wanted)


def _check_error(error: dict[str, Any], check: Mapping[str, Any]) -> None:
    if "code" in check:
        assert error["code"] in _list(check["code"]), error
    if "param" in check:
        param, wanted = error["param"] or "", check["param"]
        assert param == wanted or param.startswith((f"{wanted}.", f"{wanted}[")), error
    for text in check.get("says", ()):
        assert text in error["message"]


def _check_value(value: Any, wanted: Any) -> None:
    if not isinstance(wanted, dict):
        assert value == wanted
        return
    if "in" in wanted:
        assert value in wanted["in"]
    if "min" in wanted:
        assert value >= wanted["min"]
    if "max" in wanted:
        assert value <= wanted["max"]
    if "type" in wanted:
        assert type(value) is TYPES[wanted["type"]]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
