"""Reads the tool calls of a text that arrives in parts, and no part twice.

The grammar is written as generators that ask for more text, so that a stream and a whole text take the same
path. What it must not know: tokens, and where the rest of the text belongs.
"""

import json
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TypeVar

from engine.pieces import Segment, ToolCallPart
from engine.tools import ToolFormat

SPACES = " \t\r\n"
"""White space of JSON."""

_SPACES = re.compile(f"[{SPACES}]+")
_WORD = re.compile(r"[\w.:/+-]+")
_PLAIN = re.compile(r'[^"\\]+')
_PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_BETWEEN = re.compile(r'[^"<{}\[\]]+')
"""What a bracket-counting reader may pass over outside strings."""

_ARGUMENT_KEYS = ("arguments", "parameters")
_BARE_KEYS = ("name", "type", "id", *_ARGUMENT_KEYS)

T = TypeVar("T")
Steps = Generator[None, str, T]
"""Wants more of the text at each yield; the empty string is its end."""

Decide = Callable[[str, Segment, ToolCallPart | None], None]
"""Told of the next characters, as they stand in the text, and what they mean."""


class _MalformedError(Exception):
    """The characters are no call, or none any more."""


@dataclass(slots=True)
class _Run:
    """Characters that are read, but wait for the call to be certain; arguments are ``None`` outside them."""

    raw: str
    segment: Segment
    arguments: str | None


class CallReader:
    """Reads from an opening marker, or from a bare ``{``, to the end of the calls behind it.

    A call is certain once its name is known and its arguments have begun. Until then its characters wait. If
    it turns out to be none, they are content, and reading ends before the character that showed it.

    - An object needs a name and arguments (or parameters), in any order, before it closes. Values of other
      keys are passed over. A bare object, without a marker, may have few other keys.
    - Arguments are given out as they are written: brackets and strings are matched, no more is checked. A
      JSON string is given out decoded, as it holds the arguments' text.
    - The first character of the arguments carries the name.
    """

    def __init__(self, tools: ToolFormat, opening: str, index: int, decide: Decide) -> None:
        """Prepare to read.

        Args:
            tools: The grammar.
            opening: The marker that was read and is undecided; empty for a bare object.
            index: The number of the first call.
            decide: Told of characters in their order, each once.
        """
        self._tools = tools
        self._decide = decide
        self._is_bare = not opening
        self._unread = ""
        self._first_index = self._index = index
        self._runs = [_Run(opening, Segment.SPECIAL, None)] if opening else []
        self._name: str | None = None
        self._has_name = False
        self._has_arguments = False
        self._is_certain = False
        self._steps = self._calls()
        next(self._steps)

    @property
    def num_calls(self) -> int:
        """Calls that became certain."""
        return self._index - self._first_index

    def read(self, text: str, *, is_end: bool) -> str | None:
        """Read on.

        Returns:
            ``None`` to go on, or the undecided rest of the text behind the calls. Never ``None`` at the end.
        """
        try:
            self._steps.send(text)
            # It may look ahead in several steps, each of which must learn of the end.
            while is_end:
                self._steps.send("")
        except StopIteration:
            return self._unread
        except _MalformedError:
            held = "".join(run.raw for run in self._runs)
            if not self._is_certain:
                self._decide(held, Segment.CONTENT, None)
            return self._unread
        return None

    # Reading.

    def _peek(self, count: int = 1) -> Steps[str]:
        """Return the next characters; fewer at the end of the text."""
        while len(self._unread) < count:
            text = yield
            if not text:
                break
            self._unread += text
        return self._unread[:count]

    def _run(self, pattern: re.Pattern[str], *, is_arguments: bool = False) -> Steps[str]:
        """Take what matches, as far as it has come; empty if nothing does."""
        yield from self._peek()
        match = pattern.match(self._unread)
        if match is None:
            return ""
        self._accept(match.group(), match.group() if is_arguments else None)
        return match.group()

    def _accept(self, raw: str, arguments: str | None = None, segment: Segment = Segment.TOOL) -> None:
        """Take the next characters, as structure or with what they mean in the arguments."""
        self._unread = self._unread[len(raw) :]
        run = _Run(raw, segment, arguments)
        if self._is_certain:
            self._give(run)
            return
        self._runs.append(run)
        if arguments is not None:
            self._has_arguments = True
            self._decide_call()

    def _decide_call(self) -> None:
        """Give out what waits, if it is a call by now."""
        if self._has_arguments and self._name is not None:
            self._is_certain = True
            self._index += 1
            for run in self._runs:
                self._give(run)

    def _give(self, run: _Run) -> None:
        """Give out characters of a certain call."""
        part = None
        if run.arguments is not None:
            part = ToolCallPart(self._index - 1, self._name, run.arguments)
            self._name = None
        self._decide(run.raw, run.segment, part)

    def _begin_call(self) -> None:
        """Start anew: from here on nothing is certain."""
        self._runs = []
        self._name = None
        self._has_name = False
        self._has_arguments = False
        self._is_certain = False

    # The grammar.

    def _calls(self) -> Steps[None]:
        if self._tools is ToolFormat.HERMES:
            yield from self._spaces()
            yield from self._object()
        elif self._tools is ToolFormat.LLAMA3:
            yield from self._spaces()
            yield from self._objects(";")
        else:
            yield from self._spaces()
            char = yield from self._peek()
            if char == "[":
                self._accept(char)
                yield from self._spaces()
                yield from self._objects(",")
                if (yield from self._peek()) == "]":
                    self._accept("]")
            elif char == "{":
                yield from self._object()
            else:
                yield from self._named()

    def _objects(self, separator: str) -> Steps[None]:
        """One call or several; and the space behind them, which has no meaning."""
        while True:
            yield from self._object()
            yield from self._spaces()
            if (yield from self._peek()) != separator:
                return
            self._begin_call()
            self._accept(separator)
            yield from self._spaces()

    def _named(self) -> Steps[None]:
        """Mistral's newer form: a name, maybe an id, maybe a marker, an object."""
        name = yield from self._word()
        if not name:
            raise _MalformedError
        yield from self._spaces()
        if (yield from self._peek()) == "[":
            if (yield from self._peek(2)) == "[C":
                yield from self._literal("[CALL_ID]")
                yield from self._word()
            yield from self._literal("[ARGS]")
        yield from self._spaces()
        if (yield from self._peek()) != "{":
            raise _MalformedError
        self._name = name
        yield from self._nested(is_arguments=True)

    def _object(self) -> Steps[None]:
        yield from self._symbol("{")
        while True:
            yield from self._spaces()
            key = yield from self._string()
            if self._is_bare and key not in _BARE_KEYS:
                raise _MalformedError
            yield from self._spaces()
            yield from self._symbol(":")
            yield from self._spaces()
            if key == "name" and not self._has_name:
                self._has_name = True
                yield from self._named_by_value()
            else:
                yield from self._value(is_arguments=key in _ARGUMENT_KEYS and not self._has_arguments)
            yield from self._spaces()
            char = yield from self._peek()
            if char == "}":
                self._accept(char)
                break
            yield from self._symbol(",")
        if not self._is_certain:
            raise _MalformedError

    def _named_by_value(self) -> Steps[None]:
        name = yield from self._string()
        if not name:
            raise _MalformedError
        self._name = name
        self._decide_call()

    def _value(self, *, is_arguments: bool) -> Steps[None]:
        char = yield from self._peek()
        if char and char in "{[":
            yield from self._nested(is_arguments=is_arguments)
        elif char == '"':
            self._accept('"', "" if is_arguments else None)
            yield from (self._decoded() if is_arguments else self._quoted())
        elif (yield from self._word(is_arguments=is_arguments)) == "":
            raise _MalformedError

    def _nested(self, *, is_arguments: bool) -> Steps[None]:
        """An object or a list. Its brackets are counted only, as a model may write anything."""
        depth = 0
        while True:
            char = yield from self._peek()
            # Nothing of JSON begins so, but a marker does, which then ends an unfinished call.
            if char in ("", "<"):
                raise _MalformedError
            if char == '"':
                yield from self._any(is_arguments=is_arguments)
                yield from self._quoted(is_arguments=is_arguments)
            elif char in "{}[]":
                self._accept(char, char if is_arguments else None)
                depth += 1 if char in "{[" else -1
                if depth == 0:
                    return
            else:
                yield from self._run(_BETWEEN, is_arguments=is_arguments)

    def _quoted(self, *, is_arguments: bool = False) -> Steps[str]:
        """A JSON string as it is written, behind the quote that opens it.

        It is returned, unless it is of the arguments.
        """
        raw = ""
        is_escaped = False
        while True:
            taken = "" if is_escaped else (yield from self._run(_PLAIN, is_arguments=is_arguments))
            taken = taken or (yield from self._any(is_arguments=is_arguments))
            if not is_arguments:
                raw += taken
            if taken == '"' and not is_escaped:
                return raw
            is_escaped = taken == "\\" and not is_escaped

    def _any(self, *, is_arguments: bool = False) -> Steps[str]:
        """One character, whatever it is."""
        char = yield from self._peek()
        if not char:
            raise _MalformedError
        self._accept(char, char if is_arguments else None)
        return char

    def _string(self) -> Steps[str]:
        """A JSON string, decoded once it is whole."""
        yield from self._symbol('"')
        return _decode('"' + (yield from self._quoted()))

    def _decoded(self) -> Steps[None]:
        """A JSON string in the arguments' place, behind its first quote, decoded as it comes.

        What is no escape is kept as it is written.
        """
        while (char := (yield from self._peek())) not in ("", '"'):
            if char != "\\":
                yield from self._run(_PLAIN, is_arguments=True)
                continue
            escape = yield from self._peek(2)
            if escape == "\\u":
                escape = yield from self._peek(6)
                if escape[2:4].lower() in ("d8", "d9", "da", "db") and len(escape) == 6:
                    # The first half of a character over U+FFFF.
                    pair = yield from self._peek(8)
                    pair = (yield from self._peek(12)) if pair[6:] == "\\u" else pair
                    escape = pair if _PAIR.fullmatch(pair) else escape
            try:
                self._accept(escape, _decode(f'"{escape}"'))
            except _MalformedError:
                self._accept(char, char)
        if not char:
            raise _MalformedError
        self._accept('"', "")

    def _word(self, *, is_arguments: bool = False) -> Steps[str]:
        """A name, a number or a constant; may be empty."""
        word = ""
        while part := (yield from self._run(_WORD, is_arguments=is_arguments)):
            word += part
        return word

    def _literal(self, text: str) -> Steps[None]:
        for size in range(1, len(text) + 1):
            if (yield from self._peek(size)) != text[:size]:
                raise _MalformedError
        self._accept(text, segment=Segment.SPECIAL)

    def _symbol(self, char: str) -> Steps[None]:
        if (yield from self._peek()) != char:
            raise _MalformedError
        self._accept(char)

    def _spaces(self) -> Steps[None]:
        while (yield from self._run(_SPACES)):
            pass


def _decode(raw: str) -> str:
    """Return a JSON string's text; halves of characters become U+FFFD.

    Raises:
        _MalformedError: It is none.
    """
    try:
        text = json.loads(raw, strict=False)
    except ValueError as error:
        raise _MalformedError from error
    if not isinstance(text, str):
        raise _MalformedError
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
