"""Splits a completion into content, reasoning, tool calls and special tokens, token by token.

A pure state machine over characters that keeps track of whose token each is, so a stream and a whole answer
come out the same. Transformers' ``ResponseParser`` cannot serve here: its events do not say which characters
of the input they cover, so no token could be told its segment. It also gives tool arguments as parsed values
when a call has closed, while the raw JSON text must stream.

White space is kept where it stands, as vLLM's parsers do: the line ends around ``<think>`` belong to the
reasoning, those after ``</think>`` and before a call to the content. Only space behind a call is part of it.
"""

import re
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from engine.calls import SPACES, CallReader
from engine.pieces import Piece, Segment, ToolCallPart
from engine.tools import ToolFormat

__all__ = [
    "Piece",
    "ReasoningMarkers",
    "Segment",
    "Segmenter",
    "ToolCallPart",
    "detect_reasoning",
    "detect_tools",
    "marker_texts",
    "starts_in_reasoning",
]


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """The texts around reasoning.

    Raises:
        ValueError: One is empty or contains the other.
    """

    opening: str
    closing: str

    def __post_init__(self) -> None:
        if self.opening in self.closing or self.closing in self.opening:
            raise ValueError("reasoning markers must not be empty or contain each other")


_KNOWN_REASONING = (
    ReasoningMarkers("<think>", "</think>"),
    ReasoningMarkers("[THINK]", "[/THINK]"),
    ReasoningMarkers("<seed:think>", "</seed:think>"),
    ReasoningMarkers("◁think▷", "◁/think▷"),
)


def detect_reasoning(chat_template: str) -> ReasoningMarkers | None:
    """Return the markers that a chat template takes out of earlier answers or writes itself, if any."""
    return next((each for each in _KNOWN_REASONING if each.closing in chat_template), None)


def detect_tools(chat_template: str) -> ToolFormat | None:
    """Return the format in which a chat template writes calls; ``None`` for none or another one."""
    if "[TOOL_CALLS]" in chat_template:
        return ToolFormat.MISTRAL
    if "<tool_call>" in chat_template:
        # Some write tags inside instead of JSON.
        has_tags = "<function=" in chat_template or "<arg_key>" in chat_template
        return None if has_tags else ToolFormat.HERMES
    is_llama3 = "<|start_header_id|>" in chat_template and '"parameters": ' in chat_template
    return ToolFormat.LLAMA3 if is_llama3 or "<|python_tag|>" in chat_template else None


def starts_in_reasoning(prompt_text: str, markers: ReasoningMarkers | None, continued: str = "") -> bool:
    """Tell whether a rendered prompt ends inside an open block of reasoning.

    Args:
        prompt_text: The whole prompt. Markers inside its earlier messages do not count.
        markers: Those of the model.
        continued: The content of the last message, if it is to be continued.
    """
    if markers is None:
        return False
    last_opening, last_closing = continued.rfind(markers.opening), continued.rfind(markers.closing)
    if last_opening != last_closing:
        return last_opening > last_closing
    before = prompt_text.rstrip().removesuffix(continued.strip())
    return before.rstrip().endswith(markers.opening)


def marker_texts(reasoning: ReasoningMarkers | None, tools: ToolFormat | None) -> tuple[str, ...]:
    """Return the markers for which a :class:`Segmenter` wants to know the ids of special tokens."""
    return (*((reasoning.opening, reasoning.closing) if reasoning else ()), *(tools.markers if tools else ()))


class _Finder:
    """Finds the first of some markers, or the place from which one may still come."""

    def __init__(self, markers: tuple[str, ...]) -> None:
        self._markers = markers
        self._pattern = re.compile("|".join(map(re.escape, markers)) or "(?!)")
        self._firsts = frozenset(marker[0] for marker in markers)
        self._max_held = max(map(len, markers), default=1) - 1

    def find(self, text: str) -> tuple[int, str]:
        """Return where the text before a marker ends, and the marker; or an empty one."""
        if match := self._pattern.search(text):
            return match.start(), match.group()
        for at in range(max(0, len(text) - self._max_held), len(text)):
            if text[at] in self._firsts and any(each.startswith(text[at:]) for each in self._markers):
                return at, ""
        return len(text), ""


@dataclass(slots=True)
class _Token:
    """A token some of whose characters are undecided, or that waits for one before it."""

    num_undecided: int
    is_special: bool
    segments: set[Segment]
    content: str = ""
    reasoning: str = ""
    parts: tuple[ToolCallPart, ...] = ()
    marks_reasoning: bool = False

    def add(self, segment: Segment, text: str, part: ToolCallPart | None) -> None:
        """Decide some characters."""
        self.segments.add(segment)
        if segment is Segment.CONTENT:
            self.content += text
        elif segment is Segment.REASONING:
            self.reasoning += text
        if part is None:
            return
        if self.parts and self.parts[-1].index == part.index:
            last = self.parts[-1]
            joined = ToolCallPart(part.index, last.name, last.arguments + part.arguments)
            self.parts = (*self.parts[:-1], joined)
        else:
            self.parts = (*self.parts, part)

    def piece(self) -> Piece:
        """Return the decided token."""
        segment = Segment.SPECIAL if self.is_special else min(self.segments, key=_RANK.__getitem__)
        return Piece(segment, self.content, self.reasoning, self.parts, self.marks_reasoning)


_RANK = {segment: rank for rank, segment in enumerate(Segment)}


class Segmenter:
    """Takes the tokens of one completion, and gives out one piece per token, in their order.

    - A token waits while some of its characters may still become part of a marker or of a call, or one before
      it waits. Nothing else is held back.
    - Reasoning markers count anywhere outside calls; a repeated one is taken out as well. Markers of calls
      count in content only. What was taken for a call and is none is content, markers and all.
    - A token without text, such as the first half of a character, is part of what stands around it.
    - Special tokens that are no markers are special even if their text is shown.
    """

    def __init__(
        self,
        *,
        is_special: Callable[[int], bool],
        reasoning: ReasoningMarkers | None,
        tools: ToolFormat | None,
        starts_in_reasoning: bool = False,
        marker_ids: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Prepare for the first token.

        Args:
            is_special: Tells whether a token id marks structure.
            reasoning: The markers of reasoning; ``None`` looks for none.
            tools: The format of calls; ``None`` looks for none.
            starts_in_reasoning: The prompt has opened the reasoning.
            marker_ids: The ids of markers that are one token each. Such a token may come without text.

        Raises:
            ValueError: A marker contains another one.
        """
        markers = marker_texts(reasoning, tools)
        if any(
            one in other
            for at, one in enumerate(markers)
            for place, other in enumerate(markers)
            if at != place
        ):
            raise ValueError("the markers of reasoning and of tool calls must not contain each other")
        self._is_special = is_special
        self._reasoning = reasoning
        self._tools = tools
        wanted = (each for each in markers if each in marker_ids)
        self._marker_of = {marker_ids[each]: each for each in wanted}
        own = (reasoning.opening, reasoning.closing) if reasoning else ()
        openings = (tools.opening,) if tools else ()
        closings = (tools.closing,) if tools and tools.closing else ()
        self._finder_in_reasoning = _Finder(own)
        self._finder_in_content = _Finder(own + openings)
        self._finder_in_call = _Finder(own + openings + closings)
        self._segment = Segment.REASONING if starts_in_reasoning else Segment.CONTENT
        self._reader: CallReader | None = None
        self._num_tool_calls = 0
        self._held = ""
        self._tokens: deque[_Token] = deque()
        self._decided: list[Piece] = []
        self._may_be_bare = tools is ToolFormat.LLAMA3
        self._is_behind_call = False
        self._lacks_closing = False

    @property
    def num_tool_calls(self) -> int:
        """Calls of which something was given out."""
        return self._num_tool_calls + (self._reader.num_calls if self._reader else 0)

    def push(self, token_id: int, text: str) -> list[Piece]:
        """Add a token.

        Args:
            token_id: Its id.
            text: Its own text; empty for a skipped special token and for a character's first parts.

        Returns:
            What is decided now, in the tokens' order.
        """
        marker = self._marker_of.get(token_id)
        is_special = marker is None and self._is_special(token_id)
        text = text or marker or ""
        self._tokens.append(_Token(len(text), is_special, set()))
        self._held += text
        return self._advance(is_end=False)

    def finish(self) -> list[Piece]:
        """Decide the rest; a half marker is content, or reasoning, after all."""
        return self._advance(is_end=True)

    def _advance(self, *, is_end: bool) -> list[Piece]:
        """Decide what can be decided."""
        while self._held or (is_end and self._reader is not None):
            if self._reader is not None:
                rest = self._reader.read(self._held, is_end=is_end)
                self._held = rest or ""
                if rest is not None:
                    self._end_calls(self._reader)
            elif not self._read_text(is_end=is_end):
                break
        segment = Segment.TOOL if self._reader is not None else self._segment
        while self._tokens and not self._tokens[0].num_undecided:
            self._tokens[0].segments.add(segment)
            self._decided.append(self._tokens.popleft().piece())
        decided, self._decided = self._decided, []
        return decided

    def _read_text(self, *, is_end: bool) -> bool:
        """Read on outside calls; tell whether it is worth trying again."""
        if self._is_behind_call and (spaces := len(self._held) - len(self._held.lstrip(SPACES))):
            self._take(spaces, Segment.TOOL)
        elif self._may_be_bare and self._segment is Segment.CONTENT and self._held.lstrip(SPACES)[:1] == "{":
            self._take(self._held.index("{"), Segment.CONTENT)
            self._read_calls("")
        else:
            finder = self._finder_in_call if self._lacks_closing else self._finder_in_content
            if self._segment is Segment.REASONING:
                finder = self._finder_in_reasoning
            size, marker = finder.find(self._held)
            self._take(len(self._held) if is_end and not marker else size, self._segment)
            if not marker:
                return False
            self._meet(marker)
        return True

    def _meet(self, marker: str) -> None:
        """Change over at a marker, which the held text begins with."""
        if self._tools and marker == self._tools.opening:
            self._held = self._held[len(marker) :]
            self._read_calls(marker)
            return
        if self._reasoning and marker in (self._reasoning.opening, self._reasoning.closing):
            num_left = len(marker)
            for token in self._tokens:
                if num_left > 0:
                    token.marks_reasoning = True
                    num_left -= token.num_undecided
        self._take(len(marker), Segment.SPECIAL)
        if self._reasoning and marker == self._reasoning.opening:
            self._segment = Segment.REASONING
        elif self._reasoning and marker == self._reasoning.closing:
            self._segment = Segment.CONTENT
        else:
            self._lacks_closing = False

    def _read_calls(self, opening: str) -> None:
        assert self._tools is not None
        self._lacks_closing = False
        self._reader = CallReader(self._tools, opening, self._num_tool_calls, self._decide)

    def _end_calls(self, reader: CallReader) -> None:
        self._num_tool_calls += reader.num_calls
        self._lacks_closing = reader.num_calls > 0
        self._reader = None

    def _take(self, size: int, segment: Segment) -> None:
        """Decide the beginning of the held text."""
        text, self._held = self._held[:size], self._held[size:]
        self._decide(text, segment, None)

    def _decide(self, raw: str, segment: Segment, part: ToolCallPart | None) -> None:
        """Hand the next characters to their tokens; a part goes to the token of the last one."""
        if segment is Segment.TOOL:
            self._is_behind_call = True
        elif raw and segment is not Segment.SPECIAL:
            self._is_behind_call = False
            if segment is Segment.CONTENT and raw.strip(SPACES):
                self._may_be_bare = False
        at = 0
        while at < len(raw):
            token = self._tokens[0]
            end = min(len(raw), at + token.num_undecided)
            token.num_undecided -= end - at
            token.add(segment, raw[at:end], part if end == len(raw) else None)
            at = end
            if not token.num_undecided:
                self._decided.append(self._tokens.popleft().piece())
