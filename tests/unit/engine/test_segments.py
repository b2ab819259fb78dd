import json
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.segments import (
    Piece,
    ReasoningMarkers,
    Segment,
    Segmenter,
    ToolCallPart,
    detect_reasoning,
    detect_tools,
    marker_texts,
    starts_in_reasoning,
)
from engine.tools import ToolFormat

THINK = ReasoningMarkers("<think>", "</think>")
HERMES, LLAMA3, MISTRAL = ToolFormat
CONTENT, REASONING, TOOL, SPECIAL = Segment
EOS = 99
MARKERS = sorted({marker for each in ToolFormat for marker in marker_texts(THINK, each)})
MARKER_IDS = {marker: 100 + place for place, marker in enumerate(MARKERS)}


def segmenter(
    tools: ToolFormat | None = HERMES,
    reasoning: ReasoningMarkers | None = THINK,
    *,
    is_open: bool = False,
) -> Segmenter:
    return Segmenter(
        is_special=lambda token_id: token_id >= EOS,
        reasoning=reasoning,
        tools=tools,
        starts_in_reasoning=is_open,
        marker_ids={each: MARKER_IDS[each] for each in marker_texts(reasoning, tools) if each in MARKER_IDS},
    )


def steps(
    texts: Sequence[str], tools: ToolFormat | None = HERMES, *, is_open: bool = False
) -> list[list[Piece]]:
    """What each token decided, and then what the end did. ``#EOS`` and ``#<marker>`` come without text."""
    one = segmenter(tools, is_open=is_open)
    decided = []
    for text in texts:
        if text == "#EOS":
            decided.append(one.push(EOS, ""))
        elif text.startswith("#") and text[1:] in MARKER_IDS:
            decided.append(one.push(MARKER_IDS[text[1:]], ""))
        else:
            decided.append(one.push(1, text))
    return [*decided, one.finish()]


def pieces(texts: Sequence[str], tools: ToolFormat | None = HERMES, *, is_open: bool = False) -> list[Piece]:
    found = [piece for step in steps(texts, tools, is_open=is_open) for piece in step]
    assert len(found) == len(texts)
    return found


Fields = tuple[str, str, list[tuple[str | None, str]]]


def fields(found: Iterable[Piece]) -> Fields:
    """Join the pieces to a message. Each call's name must come once, first, and the calls in order."""
    content, reasoning = "", ""
    calls: list[tuple[str | None, str]] = []
    for piece in found:
        content += piece.content
        reasoning += piece.reasoning
        for part in piece.tool_parts:
            if part.name is not None:
                assert part.index == len(calls)
                calls.append((part.name, ""))
            assert part.index == len(calls) - 1
            name, arguments = calls[part.index]
            calls[part.index] = name, arguments + part.arguments
    return content, reasoning, calls


def message(text: str, tools: ToolFormat | None = HERMES) -> Fields:
    return fields(pieces([text], tools))


def content(text: str, segment: Segment = CONTENT) -> Piece:
    return Piece(segment, content=text)


def thought(text: str) -> Piece:
    return Piece(REASONING, reasoning=text)


def part(arguments: str, name: str | None = None, index: int = 0) -> Piece:
    return Piece(TOOL, tool_parts=(ToolCallPart(index, name, arguments),))


MARK, CALL = Piece(SPECIAL), Piece(TOOL)


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["Hi", " there", "#EOS"], [[content("Hi")], [content(" there")], [MARK], []]),
        (["<think>", "\n", "a", "</think>", "\n\n", "b"],
         [[MARK], [thought("\n")], [thought("a")], [MARK], [content("\n\n")], [content("b")], []]),
        (["#<think>", "a", "#</think>", "b"], [[MARK], [thought("a")], [MARK], [content("b")], []]),
        (["<", "th", "ink", ">", "a"], [[], [], [], [MARK] * 4, [thought("a")], []]),
        (["<think", ">a", ".</think>\n", "b"],
         [[], [MARK, thought("a")], [Piece(CONTENT, "\n", ".")], [content("b")], []]),
        (["a <", "b", "<", "#EOS"], [[], [content("a <"), content("b")], [], [], [content("<"), MARK]]),
        (["<thi", "s", "<think>"], [[], [content("<thi"), content("s")], [MARK], []]),
        (["<think>", "never", " ends", "#EOS"], [[MARK], [thought("never")], [thought(" ends")], [MARK], []]),
        (["<think>", "</thi"], [[MARK], [], [thought("</thi")]]),
        (["<think>", "<tool_call>", "</think>"], [[MARK], [thought("<tool_call>")], [MARK], []]),
        (["#<think>", "#<tool_call>", "x"], [[MARK], [thought("<tool_call>")], [thought("x")], []]),
        # The first half of a character is part of what it stands in.
        (["", "é", "<think>", "", "é"],
         [[content("")], [content("é")], [MARK], [thought("")], [thought("é")], []]),
        (["<", "", "é"], [[], [], [content("<"), content(""), content("é")], []]),
        (["</think>", "a"], [[MARK], [content("a")], []]),
        (["</tool_call>"], [[content("</tool_call>")], []]),
    ],
)  # fmt: skip
def test_each_token_is_decided_as_soon_as_its_characters_are(
    texts: list[str], expected: list[list[Piece]]
) -> None:
    assert steps(texts) == expected


HEAD = ["<tool_call>", "\n", '{"name"', ': "f", ', '"arguments": ']


@pytest.mark.parametrize(
    ("tools", "texts", "expected"),
    [
        (HERMES, [*HEAD, '{"a"', ": 1", "}", "}", "\n", "</tool_call>", "\n", "#EOS"],
         [[], [], [], [], [], [MARK, CALL, CALL, CALL, CALL, part('{"a"', "f")], [part(": 1")], [part("}")],
          [CALL], [CALL], [MARK], [CALL], [MARK], []]),
        (HERMES, ["Sure.\n", "#<tool_call>", '{"name":"f","arguments":{', "}}", "#</tool_call>", " ok"],
         [[content("Sure.\n")], [], [MARK, part("{", "f")], [part("}")], [MARK], [content("ok")], []]),
        # Arguments wait for the name.
        (HERMES, ["<tool_call>", '{"arguments": ', '{"a": 1}', ', "name": ', '"f"', "}", "</tool_call>"],
         [[], [], [], [], [MARK, CALL, part('{"a": 1}', "f"), CALL, CALL], [CALL], [MARK], []]),
        # A string holds the arguments' text.
        (HERMES, ["<tool_call>", '{"name": "f", "arguments": "', '{\\"a', '\\', '": \\u00', 'e9}"', "}"],
         [[], [MARK, part("", "f")], [part('{"a')], [], [CALL], [part('": '), part("é}")], [CALL], []]),
        (LLAMA3, ['{"name": "f", "parameters": ', "{}", "}", "; ", '{"name": "g", "parameters": {', "}}"],
         [[], [CALL, part("{}", "f")], [CALL], [], [CALL, part("{", "g", 1)], [part("}", None, 1)], []]),
        (LLAMA3, ["#<|python_tag|>", '{"name": "f", "parameters": {', "}}", "#EOS"],
         [[], [MARK, part("{", "f")], [part("}")], [MARK], []]),
        (LLAMA3, ["\n", '{"name": "Bob", ', '"age"', ": 3}"],
         [[content("\n")], [], [content('{"name": "Bob", '), content('"age"')], [content(": 3}")], []]),
        (LLAMA3, ["Hi ", '{"name": "f", "parameters": {}}'],
         [[content("Hi ")], [content('{"name": "f", "parameters": {}}')], []]),
        (MISTRAL,
         ["#[TOOL_CALLS]", '[{"name": "f", "arguments": {', "}}", ", ", '{"name":"g","arguments":{', "}}]"],
         [[], [MARK, part("{", "f")], [part("}")], [], [CALL, part("{", "g", 1)], [part("}", None, 1)], []]),
        (MISTRAL, ["#[TOOL_CALLS]", "f", "#[ARGS]", "{", "}", "#[TOOL_CALLS]", "g", '{"a": 1}'],
         [[], [], [], [MARK, CALL, MARK, part("{", "f")], [part("}")], [], [],
          [MARK, CALL, part('{"a": 1}', "g", 1)], []]),
        (MISTRAL, ["[TOOL_CALLS]", "f", "[CALL_ID]", "x1", "[ARGS]", "{"],
         [[], [], [], [], [], [MARK, CALL, MARK, CALL, MARK, part("{", "f")], []]),
        (None, ["<tool_call>", "#EOS"], [[content("<tool_call>")], [MARK], []]),
    ],
)  # fmt: skip
def test_calls_are_given_out_as_they_come(
    tools: ToolFormat | None, texts: list[str], expected: list[list[Piece]]
) -> None:
    assert steps(texts, tools) == expected


@pytest.mark.parametrize(
    ("tools", "text", "expected"),
    [
        # Nothing was given out: all of it is content.
        (HERMES, "<tool_call>no json</tool_call>", ("<tool_call>no json</tool_call>", [])),
        (HERMES, "<tool_call>", ("<tool_call>", [])),
        (HERMES, '<tool_call>{"name": "f"}</tool_call>', ('<tool_call>{"name": "f"}</tool_call>', [])),
        (HERMES, '<tool_call>{"name": 1, "arguments": {}}', ('<tool_call>{"name": 1, "arguments": {}}', [])),
        (HERMES, '<tool_call>{"name":"\\x","arguments":', ('<tool_call>{"name":"\\x","arguments":', [])),
        (HERMES, '<tool_call>{"arguments": {"a"', ('<tool_call>{"arguments": {"a"', [])),
        (HERMES, "<tool_call>{}", ("<tool_call>{}", [])),
        # The marker that shows it is read again.
        (HERMES, '<tool_call> <tool_call>{"name":"f","arguments":{}}</tool_call>',
         ("<tool_call> ", [("f", "{}")])),
        (HERMES, "<tool_call><think>a</think>", ("<tool_call>", [])),
        # Something was given out: the call ends there.
        (HERMES, '<tool_call>{"name":"f","arguments":{"a": </tool_call>b', ("b", [("f", '{"a": ')])),
        (HERMES, '<tool_call>{"name":"f","arguments":{}}}</tool_call>', ("}", [("f", "{}")])),
        (HERMES, '<tool_call>{"name":"f","arguments":{"a": "<x', ("", [("f", '{"a": "<x')])),
        (HERMES, '<tool_call>{"name":"f","arguments":"{\\u12', ("", [("f", "{\\u12")])),
        (HERMES, '<tool_call>{"name":"f","arguments":"\\x\\u1"}', ("", [("f", "\\x\\u1")])),
        (LLAMA3, '{"name":"f","parameters":{}} and more', ("and more", [("f", "{}")])),
        (LLAMA3, '{"name":"f","parameters":{}};', (";", [("f", "{}")])),
        (LLAMA3, '{"name":"f","parameters":{}}{"name":"g","parameters":[]}',
         ("", [("f", "{}"), ("g", "[]")])),
        (LLAMA3, '<|python_tag|>f.call("a")', ('<|python_tag|>f.call("a")', [])),
        (MISTRAL, "[TOOL_CALLS][]", ("[TOOL_CALLS][]", [])),
        (MISTRAL, "[TOOL_CALLS]f[ARG", ("[TOOL_CALLS]f[ARG", [])),
        (MISTRAL, '[TOOL_CALLS][{"name":"f","arguments":{}}, 1]', (", 1]", [("f", "{}")])),
        # Odd, but calls.
        (HERMES, '<tool_call>{"name":"f","x":[{"}":1}],"arguments":null,"name":"g"}', ("", [("f", "null")])),
        (HERMES, '<tool_call>{"name":"\\u0066\\"","arguments":{}}', ("", [('f"', "{}")])),
        (HERMES, '<tool_call>{"name":"f","arguments":"\\ud83d\\ude00\\ud83d"}', ("", [("f", "😀\ufffd")])),
        (HERMES, '<tool_call>{"name":"f","arguments":{"b": "}\\"{",  "c":\n[]}}',
         ("", [("f", '{"b": "}\\"{",  "c":\n[]}')])),
        (HERMES, '<tool_call>{"name":"f","arguments":{"a":"</tool_call>"}}</tool_call>',
         ("", [("f", '{"a":"</tool_call>"}')])),
        (MISTRAL, '[TOOL_CALLS] {"name":"f","arguments":{},"id":"x"}', ("", [("f", "{}")])),
    ],
)  # fmt: skip
def test_what_is_no_call_is_content_and_what_was_begun_ends(
    tools: ToolFormat, text: str, expected: tuple[str, list[tuple[str, str]]]
) -> None:
    found = message(text, tools)
    assert (found[0], found[2]) == expected
    one = segmenter(tools)
    one.push(1, text)
    one.finish()
    assert one.num_tool_calls == len(expected[1])


def test_reasoning_may_have_begun_in_the_prompt() -> None:
    assert fields(pieces(["a", "</think>", "b"], is_open=True)) == ("b", "a", [])
    assert fields(pieces(["<think>", "a"], is_open=True)) == ("", "a", [])
    assert fields(pieces(["a", "b"], is_open=True)) == ("", "ab", [])


def test_without_parsers_each_token_is_content_or_special() -> None:
    one = segmenter(None, None)
    assert one.push(1, "<think>") == [content("<think>")]
    assert one.push(EOS, "") == [MARK]
    assert one.push(EOS, "<|end|>") == [content("<|end|>", SPECIAL)]
    assert one.push(1, "") == [content("")]
    assert one.finish() == []


def test_the_end_can_be_told_twice() -> None:
    one = segmenter()
    one.push(1, "<")
    assert one.finish() == [content("<")]
    assert one.finish() == []


def test_the_number_of_calls_is_known_as_soon_as_one_is_certain() -> None:
    one = segmenter()
    one.push(1, '<tool_call>{"name": "f", "arguments": ')
    assert one.num_tool_calls == 0
    one.push(1, "{")
    assert one.num_tool_calls == 1


GOOD = [
    (HERMES, '<think>\na {</think>\n\nHi <b>\n<tool_call>\n{"name": "f", "arguments": {"x": "\\"<"}}\n'
             '</tool_call>\n'
             '<tool_call>{"arguments": "{\\"\\ud83d\\ude00\\"}", "name": "g"}</tool_call> end <tool_call>x'),
    (LLAMA3, '<think>a</think>\n{"name": "f", "parameters": {"x": [1]}} ; '
             '{"name": "g", "parameters": {}}\n;{"x'),
    (LLAMA3, 'Hi <|python_tag|>{"type": "function", "name": "f", "parameters": {}}<|python_tag|>print(1)'),
    (MISTRAL, 'Hi [TOOL_CALLS] [{"name": "f", "arguments": {"x": [1]}}, '
              '{"name": "g", "arguments": {}}] end [T'),
    (MISTRAL, '[TOOL_CALLS]f[CALL_ID]x1[ARGS]{"a": 1}[TOOL_CALLS]g{"b": {}}[TOOL_CALLS]h[ARGS]1'),
]  # fmt: skip


@pytest.mark.parametrize(("tools", "text"), GOOD)
def test_a_split_at_any_place_gives_the_same(tools: ToolFormat, text: str) -> None:
    whole = message(text, tools)
    assert whole[2]
    for at in range(1, len(text)):
        assert fields(pieces([text[:at], text[at:]], tools)) == whole
    assert fields(pieces(list(text), tools)) == whole


@pytest.mark.parametrize(("tools", "text"), GOOD)
def test_markers_of_one_id_and_markers_of_several_tokens_give_the_same(tools: ToolFormat, text: str) -> None:
    texts = [text]
    for marker in marker_texts(THINK, tools):
        texts = [each for one in texts for each in one.replace(marker, f"\0#{marker}\0").split("\0") if each]
    assert any(each.startswith("#") for each in texts)
    assert fields(pieces(texts, tools)) == message(text, tools)


def test_calls_agree_with_a_json_parser() -> None:
    for tools, text in GOOD:
        for name, arguments in message(text, tools)[2]:
            assert name in "fgh"
            json.loads(arguments.replace("😀", "x") if arguments != '{"😀"}' else "{}")


words = st.sampled_from(
    [
        *MARKERS,
        *'<>[]{}:,;"\\ \n\tab1é😀',
        *("name", "arguments", "parameters", "type", "null", "\\ud83d", "\\u0041", "}}"),
        *("<tool", "_call>", "[TOOL_", "[ARGS", "</thi", '"name": "f", ', '"arguments": {'),
        '{"name": "f", "arguments": {"x": 1}}',
        '{"arguments": "\\u00e9\\ud83d\\ude00", "name": "g"}',
    ]
)
junk = st.lists(words | st.text(max_size=3), max_size=14).map("".join)
formats = st.sampled_from([*ToolFormat, None])
cuts = st.lists(st.integers(0, 99), max_size=12)


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted(min(place, len(text)) for place in places)
    return [text[start:end] for start, end in pairwise([0, *ends, len(text)])]


@given(junk, cuts, formats, st.booleans())
@example('<tool_call>{"arguments": "\\ud83d', [], HERMES, False)
@example('{"name": "f", "parameters": {}};;', [], LLAMA3, False)
def test_any_text_in_any_split_gives_the_same_and_one_piece_per_token(
    text: str, places: list[int], tools: ToolFormat | None, is_open: bool
) -> None:
    parts = cut(text, places)
    one = segmenter(tools, is_open=is_open)
    num_decided = 0
    found: list[Piece] = []
    for num_pushed, each in enumerate(parts, 1):
        found += one.push(1, each)
        num_decided = len(found)
        assert num_decided <= num_pushed
    found += one.finish()
    assert len(found) == len(parts)
    assert fields(found) == fields(pieces([text], tools, is_open=is_open))
    assert one.num_tool_calls == len(fields(found)[2])


@given(junk, formats, st.booleans())
def test_no_character_is_lost(text: str, tools: ToolFormat | None, is_open: bool) -> None:
    taken_out = ""
    for char, piece in zip(text, pieces(list(text), tools, is_open=is_open), strict=True):
        match piece.segment:
            case Segment.CONTENT:
                assert piece == content(char)
            case Segment.REASONING:
                assert piece == thought(char)
            case Segment.TOOL:
                assert piece.content == piece.reasoning == ""
                assert all(each.arguments in ("", char) or "\\" in text for each in piece.tool_parts)
            case Segment.SPECIAL:
                taken_out += char
    for marker in marker_texts(THINK, tools):
        taken_out = taken_out.replace(marker, "")
    assert taken_out == ""


@given(junk, formats)
def test_a_token_waits_only_while_what_follows_can_change_it(text: str, tools: ToolFormat | None) -> None:
    """What was given out before any place stays the same, whatever comes behind it."""
    sizes = list(accumulate(len(step) for step in steps(list(text), tools)[:-1]))
    for at in {len(text) // 2, max(0, len(text) - 1)}:
        other = pieces([*text[:at], *"}]</think>x"], tools)
        same = pieces(list(text), tools)
        num_decided = sizes[at - 1] if at else 0
        assert other[:num_decided] == same[:num_decided]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.dictionaries(st.text(), json_values, max_size=3),
    st.text(min_size=1),
    st.booleans(),
    cuts,
    st.sampled_from(ToolFormat),
)
def test_any_call_is_read_as_it_was_written(
    values: dict[str, object], name: str, is_ascii: bool, places: list[int], tools: ToolFormat
) -> None:
    arguments = json.dumps(values, ensure_ascii=is_ascii)
    written = {
        HERMES: '<tool_call>\n{"name": %s, "arguments": %s}\n</tool_call>',
        LLAMA3: '{"name": %s, "parameters": %s}',
        MISTRAL: '[TOOL_CALLS][{"name": %s, "arguments": %s}]',
    }[tools]
    text = written % (json.dumps(name, ensure_ascii=is_ascii), arguments)
    assert fields(pieces(cut(text, places), tools)) == ("", "", [(name, arguments)])
    text = written % (json.dumps(name), json.dumps(arguments, ensure_ascii=is_ascii))
    assert fields(pieces(cut(text, places), tools)) == ("", "", [(name, arguments)])


def test_markers_that_contain_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="contain"):
        ReasoningMarkers("", "</think>")
    with pytest.raises(ValueError, match="contain"):
        ReasoningMarkers("think", "<think>")
    with pytest.raises(ValueError, match="tool calls"):
        segmenter(HERMES, ReasoningMarkers("<tool", "</tool>"))


@pytest.mark.parametrize(
    ("template", "reasoning", "tools"),
    [
        ("{{ messages }}", None, None),
        ("{% if '</think>' in content %}<tool_call>\\n{\"name\": ", THINK, HERMES),
        ("<tool_call>\\n<function=", None, None),
        ("[TOOL_CALLS] [THINK][/THINK]", ReasoningMarkers("[THINK]", "[/THINK]"), MISTRAL),
        ('<|start_header_id|>{"name": function name, "parameters": dictionary', None, LLAMA3),
        ("<|python_tag|>", None, LLAMA3),
        ("<tools><tool_call>", None, HERMES),
    ],
)
def test_markers_are_found_in_chat_templates(
    template: str, reasoning: ReasoningMarkers | None, tools: ToolFormat | None
) -> None:
    assert detect_reasoning(template) == reasoning
    assert detect_tools(template) == tools


@pytest.mark.parametrize(
    ("prompt", "continued", "expected"),
    [
        ("<|im_start|>assistant\n<think>\n", "", True),
        ("<|im_start|>assistant\n", "", False),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "", False),
        ("user: what does <think> mean?\nassistant: ", "", False),
        ("assistant: <think>\nso far", "<think>\nso far", True),
        ("assistant: <think>\nso far", "so far", True),
        ("assistant: <think>a</think>so far", "<think>a</think>so far", False),
        ("assistant: so far", "so far", False),
    ],
)
def test_a_prompt_may_end_in_reasoning(prompt: str, continued: str, expected: bool) -> None:
    assert starts_in_reasoning(prompt, THINK, continued) is expected
    assert not starts_in_reasoning(prompt, None, continued)


def test_reasoning_and_its_markers_are_told_from_other_special_tokens() -> None:
    segmenter = Segmenter(
        is_special=lambda token_id: token_id == 9, reasoning=THINK, tools=ToolFormat.HERMES, marker_ids={}
    )
    texts = [(1, "<think>"), (1, "a"), (1, "</thi"), (1, "nk>"), (1, "b"), (1, "<tool_call>x"), (9, "")]
    pieces = [piece for token_id, text in texts for piece in segmenter.push(token_id, text)]
    pieces += segmenter.finish()
    assert [piece.of_reasoning for piece in pieces] == [True, True, True, True, False, False, False]
