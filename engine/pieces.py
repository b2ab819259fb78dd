"""What a completion is taken apart into: one piece per generated token."""

from dataclasses import dataclass, field
from enum import StrEnum


class Segment(StrEnum):
    """What a token, or a character, is part of."""

    CONTENT = "content"
    REASONING = "reasoning"
    TOOL = "tool"
    SPECIAL = "special"


@dataclass(frozen=True, slots=True)
class ToolCallPart:
    """What one token adds to one tool call.

    Attributes:
        index: The call's number in this message, from 0.
        name: The whole name of the function; on the call's first part only.
        arguments: The next characters of the arguments' JSON text; may be empty.
    """

    index: int
    name: str | None
    arguments: str


@dataclass(frozen=True, slots=True)
class Piece:
    """One generated token, decided.

    Attributes:
        segment: Content before reasoning before tool, if the token has text of several.
        content: What it adds to the visible text.
        reasoning: What it adds to the reasoning.
        tool_parts: What it adds to tool calls, one part per call.
        marks_reasoning: Whether it is a marker of reasoning, or a part of one.
    """

    segment: Segment
    content: str = ""
    reasoning: str = ""
    tool_parts: tuple[ToolCallPart, ...] = ()
    marks_reasoning: bool = field(default=False, compare=False)

    @property
    def of_reasoning(self) -> bool:
        """Tell whether the token is reasoning or a marker of it, and nothing else."""
        return self.segment is Segment.REASONING or (self.segment is Segment.SPECIAL and self.marks_reasoning)
