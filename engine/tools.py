"""The forms in which models write tool calls: their markers, the grammar of forced ones, and plain text.

Knows how calls are written, not how they are read: that is :mod:`engine.calls`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from engine.grammar import ToolCall, ToolCalls


class ToolFormat(StrEnum):
    """How a family of models writes its calls.

    ``HERMES``, Qwen too: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, repeated.
    ``LLAMA3``: ``{"name": …, "parameters": {…}}`` as the message, several separated by ``;``.
    ``MISTRAL``: ``[TOOL_CALLS][{"name": …, "arguments": {…}}, …]``, or ``[TOOL_CALLS]name[ARGS]{…}``
    repeated, where ``[ARGS]`` may be missing and ``[CALL_ID]…`` may stand before it.
    """

    HERMES = "hermes"
    LLAMA3 = "llama3"
    MISTRAL = "mistral"

    @property
    def opening(self) -> str:
        """The marker before calls."""
        return _MARKERS[self][0]

    @property
    def closing(self) -> str | None:
        """The marker after a call."""
        return "</tool_call>" if self is ToolFormat.HERMES else None

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers; each may be one token."""
        return _MARKERS[self]


_MARKERS: Mapping[ToolFormat, tuple[str, ...]] = {
    ToolFormat.HERMES: ("<tool_call>", "</tool_call>"),
    ToolFormat.LLAMA3: ("<|python_tag|>",),
    ToolFormat.MISTRAL: ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
}


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the model may call.

    Attributes:
        name: What the model calls it.
        description: For the model; may be empty.
        parameters: The JSON schema of its arguments, as JSON text.
        param: Names the schema in an error.
    """

    name: str
    description: str = ""
    parameters: str = '{"type": "object"}'
    param: str | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """A call made earlier.

    Attributes:
        name: Of the function.
        arguments: JSON text.
    """

    name: str
    arguments: str


def forced_calls(tools: ToolFormat, functions: Sequence[Function], *, is_many: bool) -> ToolCalls:
    """Return how calls of these functions are written, in a form that :mod:`engine.calls` reads.

    Args:
        tools: The model's format.
        functions: Those that may be called, at least one.
        is_many: Allow several calls.

    Raises:
        ValueError: There is no function.
    """
    if not functions:
        raise ValueError("a forced call needs a function")
    key = "parameters" if tools is ToolFormat.LLAMA3 else "arguments"
    begin, before, after, separator, end = {
        ToolFormat.HERMES: ("", "<tool_call>\n", "\n</tool_call>", "\n", ""),
        ToolFormat.LLAMA3: ("", "", "", "; ", ""),
        ToolFormat.MISTRAL: ("[TOOL_CALLS][", "", "", ", ", "]"),
    }[tools]
    calls = tuple(
        ToolCall(
            f'{before}{{"name": {_quoted(each.name)}, "{key}": ', each.parameters, "}" + after, each.param
        )
        for each in functions
    )
    return ToolCalls(begin, calls, separator, end, is_many)


def tool_prompt(functions: Sequence[Function]) -> str:
    """Return a system message that offers functions, in Hermes' form, where a chat template cannot."""
    listed = "\n".join(
        f'{{"name": {_quoted(each.name)}, "description": {_quoted(each.description)}, '
        f'"parameters": {each.parameters}}}'
        for each in functions
    )
    return (
        "These functions are at your disposal. Each line describes one, with its arguments' JSON schema:\n"
        f"<tools>\n{listed}\n</tools>\n"
        "If a function helps to answer, call it by writing exactly this, once per call:\n"
        '<tool_call>\n{"name": "the function\'s name", "arguments": {"its": "arguments"}}\n</tool_call>\n'
        "Results come back between <tool_response> and </tool_response>. Otherwise answer in plain text."
    )


def render_calls(content: str, calls: Sequence[Call]) -> str:
    """Return an assistant's message with its calls as plain text, in the form of :func:`tool_prompt`.

    Arguments that are no JSON are written as a JSON string.
    """
    bodies = (f'{{"name": {_quoted(each.name)}, "arguments": {_as_json(each.arguments)}}}' for each in calls)
    texts = [f"<tool_call>\n{body}\n</tool_call>" for body in bodies]
    return "\n".join([content, *texts] if content else texts)


def render_result(content: str) -> str:
    """Return a function's result as plain text, for a message of the user."""
    return f"<tool_response>\n{content}\n</tool_response>"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _as_json(text: str) -> str:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return _quoted(text)
    return text
