"""How the tokens of an answer are read: as one text, or as reasoning, content and tool calls."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from engine.grammar import ToolCalls
from engine.segments import ReasoningMarkers, Segmenter, marker_texts
from engine.tokenizer import Tokenizer
from engine.tools import Function, ToolFormat, forced_calls
from schemas.generate import ParseContext, ParseFunction
from schemas.sampling import GenerationFields
from service.convert.choice import Splitting
from service.errors import Problem, ProblemsError


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a conversation's prompt and request say about its answer.

    Attributes:
        reasoning: The markers around reasoning; ``None`` looks for none.
        in_reasoning: The prompt ends inside reasoning.
        tools: The form of tool calls; ``None`` looks for none.
        forced: The functions one of which must be called, if any must.
        is_named: The request named that function.
        is_many: Several calls may come; else the first one is given out.
        hides_reasoning: Leave out reasoning, and all that belongs to it.
    """

    reasoning: ReasoningMarkers | None = None
    in_reasoning: bool = False
    tools: ToolFormat | None = None
    forced: tuple[Function, ...] = ()
    is_named: bool = False
    is_many: bool = True
    hides_reasoning: bool = False

    @property
    def reasoning_end(self) -> str | None:
        """The marker that the answer must write before anything else counts, if there is one."""
        return self.reasoning.closing if self.reasoning is not None and self.in_reasoning else None

    def calls(self) -> ToolCalls | None:
        """Return the calls that must come."""
        if not self.forced or self.tools is None:
            return None
        return forced_calls(self.tools, self.forced, is_many=self.is_many and not self.is_named)

    def splitting(self, tokenizer: Tokenizer) -> Splitting | None:
        """Return how tokens are split into segments; ``None`` if they are not."""
        if self.reasoning is None and self.tools is None:
            return None
        ids = {marker: tokenizer.encode(marker) for marker in marker_texts(self.reasoning, self.tools)}
        return Splitting(
            lambda: Segmenter(
                is_special=tokenizer.is_special,
                reasoning=self.reasoning,
                tools=self.tools,
                starts_in_reasoning=self.in_reasoning,
                marker_ids={marker: found[0] for marker, found in ids.items() if len(found) == 1},
            ),
            hides_reasoning=self.hides_reasoning,
            is_single_call=not self.is_many,
        )

    def context(self, request: GenerationFields) -> ParseContext:
        """Return what another request needs to read the answer alike."""
        stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
        return ParseContext(
            reasoning=None if self.reasoning is None else (self.reasoning.opening, self.reasoning.closing),
            in_reasoning=self.in_reasoning,
            tools=None if self.tools is None else self.tools.value,
            functions=[
                ParseFunction(name=each.name, parameters=msgspec.json.decode(each.parameters))
                for each in self.forced
            ],
            is_named=self.is_named,
            is_many=self.is_many,
            include_reasoning=not self.hides_reasoning,
            stop=stop,
            stop_token_ids=request.stop_token_ids or [],
            include_stop_str_in_output=bool(request.include_stop_str_in_output),
            skip_special_tokens=request.skip_special_tokens is not False,
            min_tokens=request.min_tokens or 0,
        )


def reading_of(context: ParseContext | None) -> Reading:
    """Return what a context says.

    Raises:
        ProblemsError: Its markers cannot be told from each other.
    """
    if context is None:
        return Reading()
    try:
        reasoning = None if context.reasoning is None else ReasoningMarkers(*context.reasoning)
    except ValueError as error:
        raise ProblemsError([Problem("invalid_value", str(error), "parse_context.reasoning")]) from error
    if context.functions and context.tools is None:
        message = "needs the form of tool calls"
        raise ProblemsError([Problem("invalid_value", message, "parse_context.tools")])
    return Reading(
        reasoning=reasoning,
        in_reasoning=context.in_reasoning,
        tools=None if context.tools is None else ToolFormat(context.tools),
        forced=tuple(_functions(context.functions)),
        is_named=context.is_named,
        is_many=context.is_many,
        hides_reasoning=not context.include_reasoning,
    )


def _functions(functions: Sequence[ParseFunction]) -> list[Function]:
    return [
        Function(
            each.name,
            parameters=msgspec.json.encode(each.parameters or {"type": "object"}).decode(),
            param=f"parse_context.functions[{place}].parameters",
        )
        for place, each in enumerate(functions)
    ]
