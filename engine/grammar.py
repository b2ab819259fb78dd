"""What a completion must obey, as sets of ids that may come next: JSON, a JSON schema, forced tool calls.

The one file that knows the grammar library, llguidance. It knows neither sampling settings nor requests:
the worker asks a state for its next ids, and tells it what was chosen.
"""

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from engine.errors import InvalidRequestError
from engine.gate import Gate, Marker
from engine.schema import MAX_SCHEMA_CHARS, checked_schema
from engine.tokenizer import Tokenizer

MAX_CACHED = 64
"""Compiled grammars that are kept, of some 10 to 1000 kB each."""

MAX_MESSAGE = 200
"""Characters of a complaint of the library that are passed on."""

JSON_OPTIONS = {"whitespace_pattern": r" |\r?\n[ \t]{0,40}"}
"""White space between tokens of JSON: one space, or one line end with its indent. Small models that may write
more of it fill their answers with it."""

STACK_BYTES = 64 * 2**20
"""Of a thread that compiles. The library recurses, and ends the process where the stack ends. It needs some
4 MiB for what :data:`engine.schema.MAX_REFERENCE_DEPTH` allows; threads have 8 by default, or much less."""

MAX_RENEWAL_S = 0.05
"""Time that the worker may lose to compile a grammar again."""

FULL = "too many "
"""How the library complains of states or expressions that the copies of a grammar have gathered together."""

_STACK_LOCK = threading.Lock()

# Half of the defaults or less. The worst schemas found then cost the worker 70 ms once, before they fail.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=500_000,
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)


@dataclass(frozen=True, slots=True)
class JsonObject:
    """Any JSON object."""


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """JSON that a schema admits, its properties in the schema's order.

    Attributes:
        schema: The schema as JSON text; an object.
    """

    schema: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One of the calls that may be made: prefix, JSON, suffix.

    Attributes:
        schema: Of the JSON, as text; an object.
        param: Names the schema in an error.
    """

    prefix: str
    schema: str
    suffix: str = ""
    param: str | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class ToolCalls:
    r"""Calls that must be made: ``begin call (separator call)* end``, each call one of ``calls``.

    ``begin``, ``separator`` and ``end`` may hold names of the tokenizer's markers, such as ``<tool_call>``;
    those are matched as the one token, all else as text in whatever tokens. Where every call has marks of its
    own, the separator closes one and opens the next: ``"\n</tool_call>\n<tool_call>\n"``.

    Attributes:
        is_many: Whether there may be more calls than one.
    """

    begin: str
    calls: tuple[ToolCall, ...]
    separator: str
    end: str
    is_many: bool


GrammarSpec = JsonObject | JsonSchema | ToolCalls


@dataclass(frozen=True, slots=True, eq=False)
class Compiled:
    """What the cache keeps: a matcher at its start, for copies only, and the seconds it took to make."""

    matcher: LLMatcher
    seconds: float

    def is_full(self) -> bool:
        """Tell whether the store of states that the copies share has no room left."""
        copy = self.matcher.deep_copy()
        copy.compute_bitmask()
        return copy.is_error()


@dataclass(frozen=True, slots=True, eq=False)
class Grammar:
    """A compiled grammar, which any number of sequences may obey at once.

    Attributes:
        spec: What it was compiled from.
        param: Names it in an error.
        compiled: What came of it.
        compiler: Where it comes from.
    """

    spec: GrammarSpec
    param: str | None
    compiled: Compiled
    compiler: "GrammarCompiler"

    def start(self, after: str | None = None) -> "GrammarState":
        """Return the state of a fresh sequence.

        Args:
            after: The grammar starts behind the first one of these texts in the completion; ``None`` starts
                it at once.
        """
        return GrammarState(self, None if after is None else Gate(self.compiler.marker(after)))


class GrammarState:
    """Where one sequence is in its grammar. It lives on the host, and belongs to one thread at a time."""

    def __init__(self, grammar: Grammar, gate: Gate | None = None) -> None:
        self._grammar = grammar
        self._gate = gate
        self._matcher = grammar.compiled.matcher.deep_copy()
        self._token_ids: list[int] = []
        self._words = np.zeros(-(-grammar.compiler.num_ids // 32), np.uint32)

    def fill(self) -> NDArray[np.uint8]:
        """Return which ids may come next, one bit each.

        End tokens are among them where the grammar may end, and alone where it must.

        Returns:
            uint8 (4 * ceil(num_ids / 32),), on the host; id ``i`` is bit ``i % 8`` of byte ``i // 8``. Valid
            until the next call.

        Raises:
            InvalidRequestError: The grammar has grown beyond the limits, or the tokenizer cannot go on in it.
        """
        if self._gate is not None:
            return self._gate.fill()
        self._compute()
        if self._matcher.is_error() and FULL in self._matcher.get_error():
            self._renew()
            self._compute()
        if self._matcher.is_error():
            raise self._failure()
        if not self._words.any():
            raise InvalidRequestError("no token of the model goes on in the grammar", self._grammar.param)
        return self._words.view(np.uint8)

    def accept(self, token_id: int) -> None:
        """Go on behind a token.

        Raises:
            InvalidRequestError: The token was not one that might come, or led beyond the limits.
        """
        if self._gate is not None:
            if self._gate.accept(token_id):
                self._gate = None
            return
        if not self._matcher.consume_token(token_id) and FULL in self._matcher.get_error():
            self._renew()
            self._matcher.consume_token(token_id)
        if self._matcher.is_error():
            raise self._failure()
        self._token_ids.append(token_id)

    @property
    def is_finished(self) -> bool:
        """Tell whether nothing but an end token may come."""
        return self._gate is None and self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def may_end(self) -> bool:
        """Tell whether the completion so far is a whole one."""
        return self._gate is None and self._matcher.is_accepting()

    def _compute(self) -> None:
        """Write the next ids, whatever they are worth."""
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)

    def _renew(self) -> None:
        """Go on with a fresh matcher: copies share one store of states, which others may have filled."""
        fresh = self._grammar.compiler.renewed(self._grammar)
        if fresh is not None:
            self._matcher = fresh.matcher.deep_copy()
            self._matcher.consume_tokens(self._token_ids)

    def _failure(self) -> InvalidRequestError:
        place = len(self._token_ids)
        return InvalidRequestError(
            f"the grammar cannot be followed beyond {place} tokens: {_complaint(self._matcher)}",
            self._grammar.param,
        )


class GrammarCompiler:
    """Compiles grammars for one tokenizer, and keeps them. Any thread may use it, but the worker should not.

    Attributes:
        num_ids: Ids from here on are padding of the head, and never allowed.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        """Prepare an empty compiler.

        Args:
            tokenizer: The model's.
            vocab_size: V, the width of a logits row.
            eos_token_ids: All ids that end a completion.
        """
        self.num_ids = min(tokenizer.vocab_size, vocab_size)
        self._tokenizer = tokenizer
        self._eos_token_ids = sorted(each for each in eos_token_ids if each < self.num_ids)
        self._lock = threading.Lock()
        self._cache: OrderedDict[GrammarSpec, Compiled] = OrderedDict()
        self._markers: dict[str, Marker] = {}
        self._tokens: list[bytes] = []
        self._vocabulary: LLTokenizer | None = None

    def compile(self, spec: GrammarSpec, param: str | None = None, *, after: str | None = None) -> Grammar:
        """Return a grammar. The first call takes up to a second, others a millisecond to a second; blocks.

        Args:
            spec: What to obey.
            param: Names the grammar in errors, unless a part of it names itself.
            after: A text behind which it will start; prepares that also.

        Raises:
            InvalidRequestError: A schema is no valid one, uses a keyword that is not supported, is too large,
                or admits nothing; or the model has no end token.
        """
        if not self._eos_token_ids:
            raise InvalidRequestError("the model has no end token, so no grammar can end", param)
        vocabulary = self._prepared()
        if after is not None:
            self.marker(after)
        with self._lock:
            compiled = self._cache.get(spec)
        if compiled is None or compiled.is_full():
            compiled = self._compiled(vocabulary, spec, param)
        self._keep(spec, compiled)
        return Grammar(spec, param, compiled, self)

    def renewed(self, grammar: Grammar) -> Compiled | None:
        """Return what another sequence has put in place of a grammar that is full, or compile it again.

        This is the one thing that the worker compiles, so nothing that took long is: then there is ``None``.
        """
        with self._lock:
            compiled = self._cache.get(grammar.spec)
        if compiled is not None and compiled is not grammar.compiled and not compiled.is_full():
            return compiled
        if grammar.compiled.seconds > MAX_RENEWAL_S:
            return None
        compiled = self._compiled(self._prepared(), grammar.spec, grammar.param)
        self._keep(grammar.spec, compiled)
        return compiled

    def _keep(self, spec: GrammarSpec, compiled: Compiled) -> None:
        """Put what was compiled into the cache, the least recently used one out of it."""
        with self._lock:
            self._cache[spec] = compiled
            self._cache.move_to_end(spec)
            while len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)

    def marker(self, text: str) -> Marker:
        """Return what a gate needs to know of its text.

        Raises:
            InvalidRequestError: The text is empty.
        """
        if not text:
            raise InvalidRequestError("a grammar cannot start after an empty text")
        self._prepared()
        marker = self._markers.get(text)
        if marker is None:
            # Markers come from the server's settings, so there are few.
            marker = self._markers[text] = Marker.of(text.encode(), self._tokens, self._eos_token_ids)
        return marker

    def _prepared(self) -> LLTokenizer:
        """Return the vocabulary as the library knows it, made once."""
        with self._lock:
            if self._vocabulary is None:
                self._tokens = [self._tokenizer.token_bytes(each) for each in range(self.num_ids)]
                special = {*self._tokenizer.markers.values(), *self._eos_token_ids}
                special |= {each for each in range(self.num_ids) if self._tokenizer.is_special(each)}
                source = _Vocabulary(
                    self._tokens,
                    self._eos_token_ids[0],
                    sorted(each for each in special if each < self.num_ids),
                )
                self._vocabulary = LLTokenizer(TokenizerWrapper(source), eos_token=self._eos_token_ids)
            return self._vocabulary

    def _compiled(self, vocabulary: LLTokenizer, spec: GrammarSpec, param: str | None) -> Compiled:
        """Compile one grammar."""
        began = time.perf_counter()
        match spec:
            case JsonObject():
                rules = ["start: " + _json_rule({"type": "object"})]
            case JsonSchema(schema):
                rules = ["start: " + _json_rule(checked_schema(schema, param))]
            case ToolCalls():
                rules = self._call_rules(spec, param)
        matcher, complaint = _matcher(vocabulary, rules)
        if matcher is not None:
            return Compiled(matcher, time.perf_counter() - began)
        for call in spec.calls if isinstance(spec, ToolCalls) else ():
            # Only one schema is to blame, as a rule.
            _, own = _matcher(vocabulary, ["start: " + _json_rule(json.loads(call.schema))])
            if own:
                raise InvalidRequestError(own, call.param or param)
        raise InvalidRequestError(complaint, param)

    def _call_rules(self, spec: ToolCalls, param: str | None) -> list[str]:
        """Return the rules of forced calls."""
        if not spec.calls:
            raise InvalidRequestError("there is no function to call", param)
        if sum(len(call.schema) for call in spec.calls) > MAX_SCHEMA_CHARS:
            raise InvalidRequestError(
                f"the schemas have more than {MAX_SCHEMA_CHARS:,} characters together", param
            )
        repeats = f" ({self._terms(spec.separator)} call)*" if spec.is_many else ""
        rules = [
            f"start: {self._terms(spec.begin)} call{repeats} {self._terms(spec.end)}",
            "call: " + " | ".join(f"call_{place}" for place in range(len(spec.calls))),
        ]
        for place, call in enumerate(spec.calls):
            schema = _json_rule(checked_schema(call.schema, call.param or param))
            rules.append(f"call_{place}: {self._terms(call.prefix)} {schema} {self._terms(call.suffix)}")
        return rules

    def _terms(self, text: str) -> str:
        """Return a text as terms of a rule; names of markers become their tokens."""
        markers = self._tokenizer.markers
        names = sorted(markers, key=len, reverse=True)
        pieces = re.split("(" + "|".join(map(re.escape, names)) + ")", text) if names else [text]
        return " ".join(
            f"<[{markers[piece]}]>" if piece in markers else json.dumps(piece) for piece in pieces if piece
        )


class _Vocabulary:
    """A tokenizer as the library reads it.

    It is never asked for ids: with ``no_forcing`` all ways to spell a text are allowed, not only the usual.
    """

    bos_token_id = None

    def __init__(self, tokens: list[bytes], eos_token_id: int, special_token_ids: list[int]) -> None:
        self.tokens = tokens
        self.eos_token_id = eos_token_id
        self.special_token_ids = special_token_ids

    def __call__(self, text: str | bytes) -> list[int]:
        """Return nothing; see above."""
        return []


def _matcher(vocabulary: LLTokenizer, rules: Sequence[str]) -> tuple[LLMatcher | None, str]:
    """Return a matcher at its start, or what is wrong with the rules. Lets go of the interpreter lock."""
    text = "\n".join(['%llguidance {"no_forcing": true}', *rules])
    made: Future[LLMatcher] = Future()

    def work() -> None:
        try:
            matcher = LLMatcher(vocabulary, text, log_level=0, limits=_LIMITS)
            if not matcher.is_error():
                # Now and not on the worker: the first look at a grammar takes longest, and copies share it.
                matcher.compute_bitmask()
            made.set_result(matcher)
        except BaseException as error:
            made.set_exception(error)

    thread = threading.Thread(target=work, name="logitwire-grammar")
    with _STACK_LOCK:
        # The size is one of the whole process; a thread that starts elsewhere meanwhile only gets more.
        usual = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    matcher = made.result()
    return (None, _complaint(matcher)) if matcher.is_error() else (matcher, "")


def _complaint(matcher: LLMatcher) -> str:
    """Return the library's complaint without places in a text that the caller never saw."""
    text = matcher.get_error()
    text = re.sub(r"^at \d+\(\d+\): |failed to compile JSON schema: ", "", text)
    text = re.split(r"\n +\d+ \| |\n<state>", text)[0]
    text = " ".join(text.split())
    return text if len(text) <= MAX_MESSAGE else text[:MAX_MESSAGE] + "…"


def _json_rule(schema: Mapping[str, Any]) -> str:
    """Return a schema as a term of a rule, under our own options."""
    return "%json " + json.dumps({**schema, "x-guidance": JSON_OPTIONS}, allow_nan=False)
