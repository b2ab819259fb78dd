import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.grammar import ToolCalls
from engine.segments import Segmenter
from engine.tools import (
    Call,
    Function,
    ToolFormat,
    forced_calls,
    render_calls,
    render_result,
    tool_prompt,
)

WEATHER = Function("get_weather", 'Weather "now".', '{"type": "object", "properties": {"city": {}}}')
TIME = Function("get_time")


def read(text: str, tools: ToolFormat) -> tuple[str, list[tuple[str | None, str]]]:
    """The content and the calls of a whole text."""
    one = Segmenter(is_special=lambda _: False, reasoning=None, tools=tools)
    content = ""
    calls: list[tuple[str | None, str]] = []
    for piece in [*one.push(1, text), *one.finish()]:
        content += piece.content
        for part in piece.tool_parts:
            calls += [(part.name, part.arguments)]
    return content, calls


def written(forced: ToolCalls, texts: list[str]) -> str:
    """What a model writes that is forced to call the functions in their order."""
    calls = [call.prefix + text + call.suffix for call, text in zip(forced.calls, texts, strict=True)]
    return forced.begin + forced.separator.join(calls) + forced.end


@pytest.mark.parametrize("tools", ToolFormat)
def test_forced_calls_are_written_as_they_are_read(tools: ToolFormat) -> None:
    functions = [WEATHER, TIME, Function('odd "name" é')]
    texts = ['{"city": "Köln"}', "{}", '{"a": [1]}']
    many = forced_calls(tools, functions, is_many=True)
    assert many.is_many
    assert [call.schema for call in many.calls] == [each.parameters for each in functions]
    names = [each.name for each in functions]
    assert read(written(many, texts), tools) == ("", list(zip(names, texts, strict=True)))
    one = forced_calls(tools, [WEATHER], is_many=False)
    assert not one.is_many
    assert read(written(one, ["{}"]), tools) == ("", [("get_weather", "{}")])


def test_a_forced_call_needs_a_function() -> None:
    with pytest.raises(ValueError, match="function"):
        forced_calls(ToolFormat.HERMES, [], is_many=False)


def test_the_prompt_describes_each_function_and_the_form_that_is_read() -> None:
    prompt = tool_prompt([WEATHER, TIME])
    listed = prompt.split("<tools>\n")[1].split("\n</tools>")[0].splitlines()
    assert [json.loads(line) for line in listed] == [
        {"name": each.name, "description": each.description, "parameters": json.loads(each.parameters)}
        for each in (WEATHER, TIME)
    ]
    _, calls = read(prompt, ToolFormat.HERMES)
    assert calls == [("the function's name", '{"its": "arguments"}')]


@given(st.lists(st.tuples(st.text(min_size=1), st.dictionaries(st.text(), st.integers()))))
def test_rendered_calls_are_read_back(calls: list[tuple[str, dict[str, int]]]) -> None:
    earlier = [Call(name, json.dumps(arguments)) for name, arguments in calls]
    content, found = read(render_calls("Let me see.", earlier), ToolFormat.HERMES)
    assert content == ("Let me see.\n" if calls else "Let me see.")
    assert found == [(each.name, each.arguments) for each in earlier]


def test_calls_without_content_and_arguments_that_are_no_json_are_rendered_too() -> None:
    text = render_calls("", [Call("f", "{oops")])
    assert text == '<tool_call>\n{"name": "f", "arguments": "{oops"}\n</tool_call>'
    assert read(text, ToolFormat.HERMES) == ("", [("f", "{oops")])
    assert render_calls("Hi", []) == "Hi"


def test_a_result_stands_between_markers() -> None:
    assert render_result("22 °C") == "<tool_response>\n22 °C\n</tool_response>"
