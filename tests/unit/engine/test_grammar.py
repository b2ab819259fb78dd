"""Grammars on the byte tokenizer: which texts they admit, what they refuse, and that rows never notice."""

import asyncio
import json
import random
import threading
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pydantic
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import grammar as grammar_module
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import InvalidRequestError, LoadingError
from engine.fake import byte_tokenizer
from engine.grammar import (
    GrammarCompiler,
    GrammarSpec,
    GrammarState,
    JsonObject,
    JsonSchema,
    ToolCall,
    ToolCalls,
)
from engine.masks import forbid
from engine.runner import CacheFullError
from engine.sampling import SampledRow, sample
from engine.types import FinishReason, RowDtype, SamplingParams
from tests.fakes import VOCAB_SIZE, hooked_load
from tests.unit.engine.test_engine import GREEDY, collect, generate, request, running, text_of

TOKENIZER = byte_tokenizer()
EOS = TOKENIZER.eos_token_id
assert EOS is not None
THINK_END = TOKENIZER.markers["</think>"]
COMPILER = GrammarCompiler(TOKENIZER, VOCAB_SIZE, [EOS])

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"enum": ["up", "down"]}},
    "required": ["x", "y"],
    "additionalProperties": False,
}


class Leaf(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    kind: Literal["leaf"]
    size: int = pydantic.Field(ge=-5, le=1000)


class Branch(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    kind: Literal["branch"]
    name: str = pydantic.Field(max_length=3)
    leaves: list[Leaf] = pydantic.Field(max_length=2)


class Tree(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    code: str = pydantic.Field(pattern="^[A-Z]{2}-[0-9]{1,3}$")
    parts: list[Leaf | Branch] = pydantic.Field(max_length=3)
    note: bool | None


def allowed(state: GrammarState) -> list[int]:
    bits = np.unpackbits(state.fill(), bitorder="little")
    return np.flatnonzero(bits).tolist()


def walk(state: GrammarState, token_ids: Sequence[int]) -> None:
    for token_id in token_ids:
        assert token_id in allowed(state)
        state.accept(token_id)


def admits(spec: GrammarSpec, text: str) -> bool:
    """Tell whether a text, its special tokens as those, is one that the grammar can end with."""
    state = COMPILER.compile(spec).start()
    for token_id in TOKENIZER.encode(text):
        if token_id not in allowed(state):
            return False
        state.accept(token_id)
    return EOS in allowed(state)


def schema(value: Any) -> JsonSchema:
    return JsonSchema(json.dumps(value))


# What is admitted.


def test_json_object_admits_objects_and_nothing_else() -> None:
    assert admits(JsonObject(), '{"a": [1, -2.5e3, null, {"b": "é\\n"}]}')
    assert admits(JsonObject(), "{}")
    for text in ("", "[]", "1", '{"a"', '{"a": 1} ', ' {"a": 1}', '{"a": <think>}', '{"a": "<think>"}'):
        assert not admits(JsonObject(), text)


def test_a_schema_admits_its_documents_and_no_others() -> None:
    assert admits(schema(POINT), '{"x": 1, "y": "up"}')
    assert admits(schema(POINT), '{\n    "x": -7,\n    "y": "down"\n}')
    for text in ('{"x": 1}', '{"x": 1.5, "y": "up"}', '{"x": 1, "y": "left"}', '{"x": 1, "y": "up", "z": 1}'):
        assert not admits(schema(POINT), text)


def test_end_tokens_come_exactly_where_the_grammar_may_end() -> None:
    ends = [EOS, TOKENIZER.markers["<|endoftext|>"]]
    state = GrammarCompiler(TOKENIZER, VOCAB_SIZE, ends).compile(schema({"type": "integer"})).start()
    assert not set(ends) & set(allowed(state))
    state.accept(ord("1"))
    assert set(allowed(state)) == {*ends, *b"0123456789"}
    assert state.may_end
    assert not state.is_finished
    state = GrammarCompiler(TOKENIZER, VOCAB_SIZE, ends).compile(JsonObject()).start()
    for token_id in TOKENIZER.encode("{}"):
        state.accept(token_id)
    assert allowed(state) == sorted(ends)
    assert state.is_finished


def test_padding_of_the_head_and_special_tokens_never_come() -> None:
    state = COMPILER.compile(schema({"type": "string"})).start()
    state.accept(ord('"'))
    assert max(allowed(state)) < 256
    assert len(state.fill()) * 8 >= COMPILER.num_ids


def test_white_space_is_what_printers_of_json_write() -> None:
    for text in ("{}", "{ }", "{\n}", "{\r\n\t\t}", "{\n" + " " * 40 + "}", '{"a": 1, "b" : [\n  2\n]\n}'):
        assert admits(JsonObject(), text)
    for text in ("{  }", "{\n\n}", "{\n" + " " * 41 + "}", "{\t}"):
        assert not admits(JsonObject(), text)


@given(st.randoms(use_true_random=False))
def test_whatever_is_chosen_the_text_is_one_that_pydantic_takes(choice: random.Random) -> None:
    state = COMPILER.compile(schema(Tree.model_json_schema())).start()
    token_ids: list[int] = []
    while (token_id := choice.choice(allowed(state))) != EOS:
        state.accept(token_id)
        token_ids.append(token_id)
        assert len(token_ids) < 5000
    Tree.model_validate_json(bytes(token_ids))


# The library knows no bare DEL, though JSON has it.
NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x7f"), max_size=3)
LEAVES = st.builds(Leaf, kind=st.just("leaf"), size=st.integers(-5, 1000))
BRANCHES = st.builds(Branch, kind=st.just("branch"), name=NAMES, leaves=st.lists(LEAVES, max_size=2))
TREES = st.builds(
    Tree,
    code=st.from_regex("[A-Z]{2}-[0-9]{1,3}", fullmatch=True),
    parts=st.lists(LEAVES | BRANCHES, max_size=3),
    note=st.sampled_from([True, False, None]),
)


@given(TREES, st.sampled_from([None, 2, 4]))
def test_what_pydantic_writes_is_admitted(tree: Tree, indent: int | None) -> None:
    assert admits(schema(Tree.model_json_schema()), tree.model_dump_json(indent=indent))


# Tool calls.

HERMES = ToolCalls(
    begin="<think>\n",  # a special token of this tokenizer
    calls=(
        ToolCall('{"name": "move", "arguments": ', json.dumps(POINT), "}"),
        ToolCall('{"name": "stop", "arguments": ', '{"type": "object", "additionalProperties": false}', "}"),
    ),
    separator="\n</think>\n<think>\n",
    end="\n</think>",
    is_many=True,
)
MISTRAL = ToolCalls("[TOOL_CALLS][", HERMES.calls, ", ", "]", is_many=True)
MOVE = '{"name": "move", "arguments": {"x": 1, "y": "up"}}'
STOP = '{"name": "stop", "arguments": {}}'


def test_forced_calls_with_marks_of_their_own_are_admitted_exactly() -> None:
    assert admits(HERMES, f"<think>\n{MOVE}\n</think>")
    assert admits(HERMES, f"<think>\n{STOP}\n</think>\n<think>\n{MOVE}\n</think>\n<think>\n{STOP}\n</think>")
    for text in (
        "",
        MOVE,
        f"<think>{MOVE}</think>",
        f"<think>\n{MOVE}",
        f"<think>\n{MOVE}\n</think>\n",
        f"<think>\n{MOVE}\n</think> <think>\n{MOVE}\n</think>",
        '<think>\n{"name": "fly", "arguments": {}}\n</think>',
        '<think>\n{"name": "stop", "arguments": {"x": 1}}\n</think>',
        '<think>\n{"name": "move", "arguments": {}}\n</think>',
    ):
        assert not admits(HERMES, text)


def test_a_marker_is_its_one_token_and_never_its_letters() -> None:
    state = COMPILER.compile(HERMES).start()
    assert allowed(state) == [TOKENIZER.markers["<think>"]]


def test_markers_that_the_tokenizer_lacks_are_text() -> None:
    assert admits(MISTRAL, f"[TOOL_CALLS][{MOVE}]")
    assert admits(MISTRAL, f"[TOOL_CALLS][{MOVE}, {STOP}]")
    for text in (
        f"[TOOL_CALLS]{MOVE}",
        f"[TOOL_CALLS][{MOVE}",
        f"[TOOL_CALLS][{MOVE},{STOP}]",
        "[TOOL_CALLS][]",
    ):
        assert not admits(MISTRAL, text)


def test_one_call_is_one_call() -> None:
    one = ToolCalls('«"\\🚀\n', HERMES.calls[1:], ", ", "»", is_many=False)
    assert admits(one, f'«"\\🚀\n{STOP}»')
    assert not admits(one, f'«"\\🚀\n{STOP}, {STOP}»')


def test_the_schema_to_blame_is_named() -> None:
    bad = ToolCall("f", '{"type": "strin"}', "", param="tools[1].function.parameters")
    with pytest.raises(InvalidRequestError, match="strin") as caught:
        COMPILER.compile(ToolCalls("", (HERMES.calls[0], bad), "", "", is_many=False), "tools")
    assert caught.value.param == "tools[1].function.parameters"
    with pytest.raises(InvalidRequestError, match="no function"):
        COMPILER.compile(ToolCalls("", (), "", "", is_many=False))


# What is refused.


def chain(num: int, depth: int) -> dict[str, Any]:
    """Return a schema whose references lead through others, each under so many arrays."""
    levels: dict[str, Any] = {}
    for place in range(num):
        level: dict[str, Any] = {"$ref": f"#/$defs/d{place + 1}"}
        for _ in range(depth):
            level = {"type": "array", "items": level}
        levels[f"d{place}"] = level
    return {"$ref": "#/$defs/d0", "$defs": {**levels, f"d{num}": {"type": "string"}}}


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"items": value}
    return value


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "no JSON"),
        ("[]", "must be an object"),
        ("true", "must be an object"),
        ('{"minimum": NaN}', "no JSON"),
        ('{"a":' * 100_000, "characters"),
        ('{"a":' * 20_000, "no JSON"),
        ('{"type": "strin"}', "Invalid type: strin"),
        ('{"properties": []}', "properties must be an object"),
        ('{"not": {"type": "string"}}', 'Unimplemented keys: ["not"]'),
        ('{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ('{"type": "string", "format": "frob"}', "frob"),
        ('{"type": "string", "pattern": "("}', "unclosed group"),
        ('{"type": "string", "pattern": "(?=a)"}', "look-around"),
        ('{"$ref": "#/$defs/none"}', "does not exist"),
        ('{"$ref": "https://example.org/schema"}', "example.org"),
        ('{"$ref": "#"}', "NoExtension"),
        ('{"type": "integer", "minimum": 5, "maximum": 3}', "minimum"),
        (json.dumps(nested(101)), "nested more than"),
        (json.dumps(chain(400, 0)), "levels together"),
        (json.dumps(chain(30, 40)), "levels together"),
        (json.dumps({"allOf": [{"$ref": f"https://a/{place}"} for place in range(5000)]}), "levels together"),
    ],
)
def test_a_schema_that_cannot_be_obeyed_is_refused_with_its_reason(text: str, complaint: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        COMPILER.compile(JsonSchema(text), "the.schema")
    assert complaint in str(caught.value)
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)
    assert caught.value.param == "the.schema"


@pytest.mark.parametrize(("num", "depth"), [(330, 0), (195, 2), (135, 4), (60, 12), (30, 28), (12, 70)])
def test_the_deepest_references_that_are_taken_do_not_exhaust_a_small_stack(num: int, depth: int) -> None:
    # A stack that ends ends the process.
    documents: list[str] = []

    def work() -> None:
        state = COMPILER.compile(schema(chain(num, depth))).start()
        token_ids = [ord("[")] * (num * depth) + [ord('"')] * 2 + [ord("]")] * (num * depth) + [EOS]
        walk(state, token_ids)
        documents.append(bytes(token_ids[:-1]).decode())

    size = threading.stack_size(2**19)
    try:
        thread = threading.Thread(target=work)
        thread.start()
    finally:
        threading.stack_size(size)
    thread.join()
    assert len(documents) == 1


def test_a_model_without_an_end_token_has_no_grammars() -> None:
    with pytest.raises(InvalidRequestError, match="no end token"):
        GrammarCompiler(TOKENIZER, VOCAB_SIZE, []).compile(JsonObject())


def test_our_own_options_stand_above_those_in_a_schema() -> None:
    sly = {"type": "string", "format": "frob", "x-guidance": {"lenient": True}}
    with pytest.raises(InvalidRequestError, match="frob"):
        COMPILER.compile(schema(sly))


# The cache.


def test_grammars_are_kept_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "MAX_CACHED", 2)
    compiler = GrammarCompiler(TOKENIZER, VOCAB_SIZE, [EOS])
    specs = [schema({"const": place}) for place in range(3)]
    first = compiler.compile(specs[0])
    assert compiler.compile(specs[0], "elsewhere").compiled is first.compiled
    compiler.compile(specs[1])
    compiler.compile(specs[0])
    compiler.compile(specs[2])
    assert compiler.compile(specs[0]).compiled is first.compiled
    compiler.compile(specs[1])
    compiler.compile(specs[2])
    assert compiler.compile(specs[0]).compiled is not first.compiled


def test_threads_may_compile_at_once() -> None:
    compiler = GrammarCompiler(TOKENIZER, VOCAB_SIZE, [EOS])
    states: list[GrammarState] = []

    def work(place: int) -> None:
        for _ in range(5):
            states.append(compiler.compile(schema({"const": place})).start())

    threads = [threading.Thread(target=work, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(allowed(state)[0] for state in states) == sorted([*b"0123"] * 5)


def spelt(state: GrammarState, choice: random.Random) -> None:
    """Write a long string of two letters."""
    state.accept(ord('"'))
    for _ in range(60):
        state.accept(choice.choice([each for each in allowed(state) if each in b"ab"]))


MANY_STATES = schema({"type": "string", "pattern": "^(a|b)*a(a|b){12}$"})


def test_a_store_of_states_that_others_have_filled_is_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    # The copies of a matcher share its lexer. Once that was full, every later sequence failed.
    monkeypatch.setattr(grammar_module, "_LIMITS", grammar_module.LLParserLimits(max_lexer_states=2000))
    compiler = GrammarCompiler(TOKENIZER, VOCAB_SIZE, [EOS])
    grammar = compiler.compile(MANY_STATES)
    choice = random.Random(0)
    for _ in range(60):
        spelt(grammar.start(), choice)
    assert grammar.compiled.is_full()
    assert not compiler.compile(MANY_STATES).compiled.is_full()


def test_a_grammar_that_takes_long_is_not_renewed_by_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "_LIMITS", grammar_module.LLParserLimits(max_lexer_states=2000))
    monkeypatch.setattr(grammar_module, "MAX_RENEWAL_S", 0)
    compiler = GrammarCompiler(TOKENIZER, VOCAB_SIZE, [EOS])
    grammar = compiler.compile(MANY_STATES)
    choice = random.Random(0)
    with pytest.raises(InvalidRequestError, match="too many states"):  # noqa: PT012 - some time
        for _ in range(60):
            spelt(grammar.start(), choice)
    spelt(compiler.compile(MANY_STATES).start(), choice)


# A late start.


def test_a_grammar_starts_behind_its_marker() -> None:
    state = COMPILER.compile(JsonObject(), after="</think>").start("</think>")
    walk(state, TOKENIZER.encode("Well, {} </thin no."))
    assert EOS not in allowed(state)
    assert not state.is_finished
    walk(state, [THINK_END])
    assert allowed(state) == [ord("{")]
    walk(state, TOKENIZER.encode("{}"))
    assert allowed(state) == [EOS]


def test_a_marker_may_come_as_letters() -> None:
    state = COMPILER.compile(JsonObject()).start("aab")
    walk(state, b"xaaab{}")
    assert allowed(state) == [EOS]
    with pytest.raises(InvalidRequestError, match="empty"):
        COMPILER.compile(JsonObject(), after="")


# Rows.


def test_rows_with_a_mask_lose_what_may_not_come_and_others_nothing() -> None:
    rows = torch.randn(3, 300)
    before = rows.clone()
    rows[2, 7] = -torch.inf
    bits = np.zeros(320, np.bool_)
    bits[[5, 299]] = True
    only = np.zeros(320, np.bool_)
    only[7] = True
    forbid(rows, {0: np.packbits(bits, bitorder="little"), 2: np.packbits(only, bitorder="little")})
    assert torch.equal(rows[1], before[1])
    assert torch.isfinite(rows[0]).nonzero().flatten().tolist() == [5, 299]
    assert torch.equal(rows[0, [5, 299]], before[0, [5, 299]])
    # Even what the model gives no chance can be chosen, if there is nothing else.
    assert torch.isfinite(rows[2]).nonzero().flatten().tolist() == [7]


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(),
        SamplingParams(temperature=1e-4),
        SamplingParams(temperature=100.0, top_k=3, top_p=0.9, min_p=0.5),
        SamplingParams(temperature=0, repetition_penalty=1.5),
        SamplingParams(repetition_penalty=100.0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mask_holds_under_all_settings_and_never_touches_the_rows(
    params: SamplingParams, dtype: torch.dtype
) -> None:
    rows = (10 * torch.randn(2, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))).to(dtype)
    before = rows.clone()
    bits = np.zeros(288, np.bool_)
    bits[[3, 4, 200]] = True
    for seed in range(20):
        generators = [torch.Generator().manual_seed(seed) for _ in range(2)]
        allowed = np.packbits(bits, bitorder="little")
        states = [SampledRow([3, 9], 1, generators[0], {3}, allowed), SampledRow([1], 1, generators[1])]
        ids, _ = sample(rows, params, states, num_ids=261)
        assert ids[0] in (3, 4, 200)
    assert torch.equal(rows, before)


# The engine.


async def constrained(engine: Engine, spec: GrammarSpec, **fields: Any) -> tuple[list[Any], Any]:
    grammar = await asyncio.to_thread(engine.compile_grammar, spec)
    return await generate(engine, grammar=grammar, **fields)


async def test_a_model_that_says_no_json_says_json_under_a_grammar() -> None:
    async with running() as engine:
        tokens, finish = await constrained(engine, schema(POINT), max_tokens=400)
    text = text_of(tokens)
    assert set(json.loads(text)) == {"x", "y"} or finish.reason is FinishReason.LENGTH
    assert text.startswith("{")


@pytest.mark.parametrize("ignore_eos", [False, True])
async def test_a_sequence_ends_where_its_grammar_does(ignore_eos: bool) -> None:
    async with running() as engine:
        tokens, finish = await constrained(engine, schema({"enum": ["a", "b"]}), ignore_eos=ignore_eos)
    assert text_of(tokens) in ('"a"', '"b"')
    assert [tokens[-1].token_id, finish.reason] == [EOS, FinishReason.STOP]


async def test_the_rows_of_a_sequence_know_nothing_of_its_grammar() -> None:
    fields: dict[str, Any] = {
        "row_dtype": RowDtype.FLOAT32,
        "logprobs": True,
        "num_top_logprobs": 3,
        "token_stats": True,
        "max_tokens": 8,
    }
    async with running() as engine:
        plain, _ = await generate(engine, **fields)
        bound, _ = await constrained(engine, schema(POINT), **fields)
    assert [token.token_id for token in bound] != [token.token_id for token in plain]
    for one, other in zip(plain, bound, strict=True):
        # The scripted rows depend on the place only, so those of both runs are the same.
        assert one.row is not None
        assert other.row is not None
        assert one.row.tobytes() == other.row.tobytes()
        assert one.top_logprobs == other.top_logprobs
        assert other.stats is not None
        assert other.logprob == float(
            torch.log_softmax(torch.from_numpy(other.row.copy()), -1)[other.token_id]
        )


async def test_a_grammar_in_the_batch_changes_nothing_for_others() -> None:
    sampling = SamplingParams(temperature=3.0)
    async with running() as engine:
        alone, _ = await generate(engine, sampling=sampling, seed=1, max_tokens=20)
        bound_alone, _ = await constrained(engine, schema(POINT), sampling=sampling, seed=2, max_tokens=20)
        grammar = engine.compile_grammar(schema(POINT))
        outboxes = [
            engine.submit(request("p", sampling=sampling, seed=1, max_tokens=20)),
            engine.submit(request("g", sampling=sampling, seed=2, max_tokens=20, grammar=grammar)),
        ]
        (together, _), (bound, _) = await asyncio.gather(*map(collect, outboxes))
    assert [each.token_id for each in together] == [each.token_id for each in alone]
    assert [each.token_id for each in bound] == [each.token_id for each in bound_alone]


async def test_a_sequence_that_makes_way_keeps_its_place_in_the_grammar() -> None:
    raised: list[int] = []

    def hook(place: int, row: torch.Tensor) -> None:
        if place == 4 and not raised:
            raised.append(place)
            raise CacheFullError

    fields: dict[str, Any] = {"sampling": SamplingParams(), "seed": 3, "max_tokens": 500}
    async with running() as engine:
        undisturbed, _ = await constrained(engine, schema(POINT), **fields)
    async with running(hooked_load(hook)) as engine:
        tokens, finish = await constrained(engine, schema(POINT), **fields)
    assert raised == [4]
    assert tokens == undisturbed
    assert finish.reason is FinishReason.STOP


async def test_a_grammar_that_fails_fails_its_own_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as engine:
        # Its many branches are one token long, and behind that more than a step may look at.
        monkeypatch.setattr(grammar_module, "_LIMITS", grammar_module.LLParserLimits(max_items_in_row=50))
        branches = [{"properties": {"a": {"const": place}}, "type": "object"} for place in range(200)]
        grammar = engine.compile_grammar(schema({"anyOf": branches}), "response_format")
        outboxes = [engine.submit(request("g", grammar=grammar)), engine.submit(request("p"))]
        with pytest.raises(InvalidRequestError, match="cannot be followed") as caught:
            await collect(outboxes[0])
        assert caught.value.param == "response_format"
        tokens, _ = await collect(outboxes[1])
        assert text_of(tokens) == "abcdefgh"
        assert engine.last_failure is None


async def test_a_grammar_may_start_behind_a_text() -> None:
    async with running(hooked_load(script="hmm</think>abc")) as engine:
        spec = schema({"enum": ["a", "b"]})
        grammar = await asyncio.to_thread(engine.compile_grammar, spec, after="</think>")
        tokens, finish = await generate(
            engine, grammar=grammar, grammar_after="</think>", skip_special_tokens=False
        )
    assert text_of(tokens) in ('hmm</think>"a"', 'hmm</think>"b"')
    assert finish.reason is FinishReason.STOP


async def test_an_engine_that_loads_compiles_nothing() -> None:
    engine = Engine(EngineConfig(model_name="hooked"), hooked_load())
    with pytest.raises(LoadingError):
        engine.compile_grammar(JsonObject())
