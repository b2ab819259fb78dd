"""Chat: requests to prompts and plans, tokens to messages and chunks."""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from engine.errors import ContextLengthError, InvalidRequestError
from engine.grammar import Grammar
from engine.segments import (
    ReasoningMarkers,
    Segment,
    ToolCallPart,
    detect_reasoning,
    detect_tools,
    starts_in_reasoning,
)
from engine.tokenizer import Tokenizer
from engine.tools import Call, Function, ToolFormat, render_calls, render_result, tool_prompt
from engine.types import GenerationRequest, ModelInfo, TokenEvent, TopLogprobs
from schemas.chat import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
    ChatRequest,
    ChoiceLogprobs,
    FinishReason,
    FunctionCall,
    FunctionCallDelta,
    NamedTool,
    TokenLogprob,
    Tool,
    ToolCall,
    ToolCallDelta,
    TopLogprob,
)
from schemas.logits import Usage
from service.convert.choice import Choice, Token
from service.convert.dialect import MIN_LOGPROB, Dialect, Put, generated_events
from service.convert.plan import Plan, check_fields, check_top_logprobs, plan_answer
from service.convert.reading import Reading
from service.errors import Problem, ProblemsError
from service.negotiate import Representation
from service.settings import Settings

MAX_TOP_LOGPROBS = 20
"""OpenAI's limit."""


# Requests.


def check_chat(request: ChatRequest, form: Representation, settings: Settings) -> None:
    """Refuse combinations that contradict each other, and what the server does not allow.

    Raises:
        ProblemsError: With every problem found.
    """
    problems = check_fields(request, form, settings)
    problems += check_top_logprobs(request.top_logprobs, MAX_TOP_LOGPROBS, settings, "top_logprobs")
    if request.top_logprobs and not _wants_entries(request):
        problems.append(Problem("invalid_value", "needs logprobs: true", "top_logprobs"))
    if request.add_generation_prompt and request.continue_final_message:
        problems.append(
            Problem("invalid_value", "contradicts add_generation_prompt: true", "continue_final_message")
        )
    if request.chat_template is not None and not settings.allow_chat_template:
        problems.append(
            Problem(
                "unsupported_parameter",
                "this server takes no template from a request; see ALLOW_CHAT_TEMPLATE",
                "chat_template",
            )
        )
    problems += _tool_problems(request)
    problems += message_problems(request.messages)
    if problems:
        raise ProblemsError(problems)


def _tool_problems(request: ChatRequest) -> list[Problem]:
    problems = []
    names: set[str] = set()
    for place, tool in enumerate(request.tools or ()):
        if tool.function.name in names:
            path = f"tools[{place}].function.name"
            problems.append(Problem("invalid_value", "another tool has this name", path))
        names.add(tool.function.name)
    choice = request.tool_choice
    if isinstance(choice, NamedTool) and choice.type != "function":
        message = "only functions can be named"
        problems.append(Problem("unsupported_parameter", message, "tool_choice.type"))
    elif isinstance(choice, NamedTool) and (choice.function is None or choice.function.name not in names):
        problems.append(Problem("invalid_value", "no tool has this name", "tool_choice.function.name"))
    if choice == "required" and not names:
        problems.append(Problem("invalid_value", "needs tools", "tool_choice"))
    is_forced = choice == "required" or isinstance(choice, NamedTool)
    if is_forced and (request.response_format or {}).get("type", "text") != "text":
        problems.append(Problem("invalid_value", "contradicts a forced tool call", "response_format"))
    return problems


def message_problems(messages: Sequence[ChatMessage]) -> list[Problem]:
    """Return what is wrong with a conversation's messages."""
    problems = []
    for place, message in enumerate(messages):
        path = f"messages[{place}].content"
        if message.content is None and message.role != "assistant":
            problems.append(Problem("invalid_value", "only an assistant's content may be null", path))
        for part_place, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if part.type != "text":
                problems.append(
                    Problem(
                        "invalid_value",
                        f"parts of type {part.type[:50]} are not supported",
                        f"{path}[{part_place}].type",
                    )
                )
            elif part.text is None:
                problems.append(
                    Problem("invalid_value", "a text part needs a text", f"{path}[{part_place}].text")
                )
    return problems


def max_tokens_of(request: ChatRequest) -> int | None:
    """Return the tokens asked for; the newer name wins."""
    return request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens


def _wants_entries(request: ChatRequest) -> bool:
    """Tell whether the JSON answer holds logprobs entries."""
    return bool(request.return_logprobs) if request.logprobs is None else request.logprobs


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered conversation: its ids, and how its answer is to be read."""

    token_ids: list[int]
    reading: Reading


def chat_prompt(
    request: ChatRequest,
    tokenizer: Tokenizer,
    max_model_len: int,
    settings: Settings,
    *,
    add_special_tokens: bool = False,
) -> ChatPrompt:
    """Return the prompt, and how its answer is to be read.

    Takes long for long prompts: not for the event loop.

    Args:
        request: The conversation.
        tokenizer: The model's.
        max_model_len: Tokens beyond which a prompt is refused.
        settings: What the server allows, and which parsers it has.
        add_special_tokens: Add what the tokenizer puts around a text to what the template has written.

    Raises:
        InvalidRequestError: The chat template refuses the messages.
        ContextLengthError: The text cannot fit the context, however well it is tokenised.
        ProblemsError: The model's way of calling tools is not known.
    """
    template = request.chat_template or tokenizer.chat_template
    functions = _functions(request)
    tools = _tool_format(template, settings) if functions else None
    is_native = "tools" in template
    template_kwargs = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        template_kwargs["reasoning_effort"] = request.reasoning_effort
    continues = bool(request.continue_final_message)
    prompts = not continues if request.add_generation_prompt is None else request.add_generation_prompt
    if is_native:
        messages = [_template_message(message) for message in request.messages]
    else:
        messages = _plain_messages(request.messages, tool_prompt(functions) if functions else None)
    text = tokenizer.render_chat(
        messages,
        add_generation_prompt=prompts,
        continue_final_message=continues,
        tools=[_template_tool(each) for each in request.tools or ()] if functions and is_native else None,
        chat_template=request.chat_template,
        template_kwargs=template_kwargs,
    )
    # Tokenising megabytes only to refuse them would take minutes and gigabytes.
    least = -(-len(text) // tokenizer.max_token_length)
    if least > max_model_len:
        raise ContextLengthError(least, max_tokens_of(request), max_model_len, is_least=True)
    reasoning = reasoning_markers(template, settings)
    continued = messages[-1]["content"] if continues else ""
    reading = Reading(
        reasoning=reasoning,
        in_reasoning=starts_in_reasoning(text, reasoning, continued),
        tools=tools,
        forced=_forced(request, functions),
        is_named=isinstance(request.tool_choice, NamedTool),
        is_many=request.parallel_tool_calls is not False,
        hides_reasoning=request.include_reasoning is False,
    )
    token_ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    if not token_ids:
        raise InvalidRequestError("the chat template makes an empty prompt of these messages", "messages")
    return ChatPrompt(token_ids, reading)


def _forced(request: ChatRequest, functions: Sequence[Function]) -> tuple[Function, ...]:
    """Return the functions one of which the request insists on."""
    choice = request.tool_choice
    if isinstance(choice, NamedTool):
        assert choice.function is not None
        return tuple(each for each in functions if each.name == choice.function.name)
    return tuple(functions) if choice == "required" else ()


def reasoning_markers(chat_template: str, settings: Settings) -> ReasoningMarkers | None:
    """Return the markers around reasoning that the settings name or the template shows."""
    match settings.reasoning_parser:
        case "off":
            return None
        case "auto":
            return detect_reasoning(chat_template)
        case markers:
            return ReasoningMarkers(*markers.split(","))


def _functions(request: ChatRequest) -> list[Function]:
    """Return the functions that the model may call in its answer."""
    if request.tool_choice == "none":
        return []
    return [
        Function(
            tool.function.name,
            tool.function.description or "",
            msgspec.json.encode(tool.function.parameters or {"type": "object"}).decode(),
            f"tools[{place}].function.parameters",
        )
        for place, tool in enumerate(request.tools or ())
    ]


def _tool_format(chat_template: str, settings: Settings) -> ToolFormat:
    if settings.tool_parser == "off":
        raise ProblemsError(
            [Problem("unsupported_parameter", "this server offers no tools; see TOOL_PARSER", "tools")]
        )
    if settings.tool_parser != "auto":
        return ToolFormat(settings.tool_parser)
    if "tools" not in chat_template:
        # Tools are then described in plain text, in this form.
        return ToolFormat.HERMES
    found = detect_tools(chat_template)
    if found is None:
        message = "the form of this model's tool calls is not known; TOOL_PARSER can name it"
        raise ProblemsError([Problem("unsupported_parameter", message, "tools")])
    return found


def _text_of(message: ChatMessage) -> str:
    """Return a message's content as one string, text parts joined by line ends."""
    content = message.content
    if content is None:
        return ""
    return content if isinstance(content, str) else "\n".join(part.text or "" for part in content)


def _template_message(message: ChatMessage) -> dict[str, Any]:
    """Return a message as templates know it; arguments of calls are objects there, as far as they are any."""
    rendered: dict[str, Any] = {"role": message.role, "content": _text_of(message)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            rendered[name] = value
    if message.tool_calls:
        rendered["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _as_object(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return rendered


def _as_object(arguments: str | dict[str, Any]) -> Any:
    """Return arguments as an object, or as they are if they are none."""
    if isinstance(arguments, dict):
        return arguments
    try:
        parsed = msgspec.json.decode(arguments)
    except (msgspec.MsgspecError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _plain_messages(messages: Sequence[ChatMessage], offer: str | None) -> list[dict[str, Any]]:
    """Return messages for a template that knows no tools: offer, calls and results as plain text.

    Args:
        messages: The conversation.
        offer: The text that describes the tools, if there are any.
    """
    plain: list[dict[str, Any]] = []
    for message in messages:
        rendered = _template_message(message)
        rendered.pop("tool_calls", None)
        if message.tool_calls:
            calls = [
                Call(call.function.name, _as_text(call.function.arguments)) for call in message.tool_calls
            ]
            rendered["content"] = render_calls(rendered["content"], calls)
        elif message.role == "tool":
            rendered |= {"role": "user", "content": render_result(rendered["content"])}
        plain.append(rendered)
    if offer is not None:
        if plain[0]["role"] in ("system", "developer"):
            plain[0]["content"] += "\n\n" + offer
        else:
            plain.insert(0, {"role": "system", "content": offer})
    return plain


def _as_text(arguments: str | dict[str, Any]) -> str:
    return arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()


def _template_tool(tool: Tool) -> dict[str, Any]:
    """Return a tool as templates know it."""
    rendered: dict[str, Any] = msgspec.to_builtins(tool)
    function = rendered["function"]
    rendered["function"] = {name: value for name, value in function.items() if value is not None}
    return rendered


def plan_chat(
    request: ChatRequest,
    form: Representation,
    prompt: ChatPrompt,
    info: ModelInfo,
    settings: Settings,
    *,
    grammar: Grammar | None,
) -> tuple[Plan, list[GenerationRequest]]:
    """Return what to answer, and what to generate: one engine request per choice.

    Raises:
        ServiceError: ``logit_budget_exceeded``.
    """
    is_newer = request.max_completion_tokens is not None
    wants_entries = _wants_entries(request)
    return plan_answer(
        request,
        form,
        [prompt.token_ids],
        info,
        settings,
        kind="chat.completion",
        max_tokens=max_tokens_of(request),
        max_tokens_name="max_completion_tokens" if is_newer else "max_tokens",
        wants_entries=wants_entries,
        num_top_logprobs=(request.top_logprobs or 0) if wants_entries else 0,
        grammar=grammar,
        grammar_after=prompt.reading.reasoning_end,
    )


# Answers.


def new_call_id(_: int = 0) -> str:
    """Return the id of a tool call. Some templates insist on nine characters."""
    return uuid.uuid4().hex[:9]


def message_of(choice: Choice, call_id: Callable[[int], str], *, is_split: bool) -> AssistantMessage:
    """Return the message of an ended choice.

    Args:
        choice: Ended.
        call_id: Returns the id of the tool call of a number.
        is_split: Whether a parser has split it.
    """
    calls = [
        ToolCall(id=call_id(place), function=FunctionCall(name=name, arguments=arguments))
        for place, (name, arguments) in enumerate(choice.tool_calls)
    ]
    content = choice.content
    return AssistantMessage(
        content=None if calls and not content else content,
        reasoning_content=(choice.reasoning or None) if is_split else UNSET,
        tool_calls=calls or UNSET,
    )


class MessageDialect(Dialect):
    """What all answers in messages share: messages, deltas and entries as OpenAI's chat has them."""

    def __init__(self, plan: Plan, tokenizer: Tokenizer, reading: Reading) -> None:
        """Prepare.

        Args:
            plan: Of the answer.
            tokenizer: The model's.
            reading: How its tokens are read.
        """
        splitting = reading.splitting(tokenizer)
        super().__init__(
            plan, tokenizer, is_split=splitting is not None, hides_tokens=reading.hides_reasoning
        )
        self._splitting = splitting
        self._is_named_call = reading.is_named
        self._call_ids: dict[tuple[int, int], str] = {}

    def choice(
        self, index: int, *, keeps_tokens: bool = True, keeps_rows: bool = False, waits_for_text: bool = True
    ) -> Choice:
        """Return an empty completion."""
        return Choice(
            index,
            self.tokenizer,
            splitting=self._splitting,
            keeps_tokens=keeps_tokens,
            keeps_rows=keeps_rows,
            waits_for_text=waits_for_text,
        )

    def _message(self, choice: Choice) -> AssistantMessage:
        return message_of(choice, partial(self._call_id, choice.index), is_split=self.is_split)

    def finish_reason(self, choice: Choice) -> FinishReason:
        """Return why an ended choice has ended."""
        assert choice.finish is not None
        reason: Literal["stop", "length", "abort"] = choice.finish.reason.value
        # OpenAI says "stop" where the caller named the function, since it was no decision of the model.
        is_call = bool(choice.tool_calls) and reason == "stop" and not self._is_named_call
        return "tool_calls" if is_call else reason

    def _call_id(self, choice: int, place: int) -> str:
        """Return the id of a tool call, the same each time."""
        return self._call_ids.setdefault((choice, place), new_call_id())

    def _prompt_token_ids(self) -> list[int] | UnsetType:
        return list(self.plan.prompts[0]) if self.plan.wants_token_ids else UNSET

    def _segments(self, tokens: Sequence[Token]) -> list[str] | UnsetType:
        if not (self.is_split and self.plan.wants_token_ids):
            return UNSET
        return [token.segment.value for token in tokens if token.segment is not None]

    def _logprobs(self, tokens: Sequence[Token], put: Put = list) -> ChoiceLogprobs | None:
        """Return the entries of generated tokens, by segment if there are segments."""
        if not self.plan.wants_entries:
            return None
        if not self.is_split:
            return ChoiceLogprobs(content=put(self._entry(token.event) for token in tokens))
        events: dict[Segment | None, list[TokenEvent | None]] = {segment: [] for segment in Segment}
        for token in tokens:
            events[token.segment].append(token.event)
        return ChoiceLogprobs(
            content=put(map(self._entry, events[Segment.CONTENT])),
            reasoning=put(map(self._entry, events[Segment.REASONING])),
            tool=put(map(self._entry, events[Segment.TOOL])),
            special=put(map(self._entry, events[Segment.SPECIAL])),
        )

    def _entry(self, event: TokenEvent | None) -> TokenLogprob:
        assert event is not None
        assert event.logprob is not None
        top = event.top_logprobs or TopLogprobs([], [])
        return TokenLogprob(
            token=self._token_text(event.token_id),
            logprob=max(event.logprob, MIN_LOGPROB),
            bytes=list(self.tokenizer.token_bytes(event.token_id)),
            top_logprobs=[
                TopLogprob(
                    token=self._token_text(token_id),
                    logprob=max(logprob, MIN_LOGPROB),
                    bytes=list(self.tokenizer.token_bytes(token_id)),
                )
                for token_id, logprob in zip(top.token_ids, top.logprobs, strict=True)
            ],
        )

    def _delta(self, choice: int, run: Sequence[Token]) -> ChatDelta:
        content, reasoning = (
            "".join(getattr(token, name) for token in run) for name in ("content", "reasoning")
        )
        parts: dict[int, list[ToolCallPart]] = {}
        for token in run:
            for part in token.tool_parts:
                parts.setdefault(part.index, []).append(part)
        return ChatDelta(
            content=content or UNSET,
            reasoning_content=reasoning or UNSET,
            tool_calls=[self._call_delta(choice, place, each) for place, each in parts.items()] or UNSET,
        )

    def _call_delta(self, choice: int, place: int, parts: Sequence[ToolCallPart]) -> ToolCallDelta:
        name, arguments = parts[0].name, "".join(part.arguments for part in parts)
        if name is None:
            return ToolCallDelta(index=place, function=FunctionCallDelta(arguments=arguments))
        return ToolCallDelta(
            index=place,
            id=self._call_id(choice, place),
            type="function",
            function=FunctionCallDelta(name=name, arguments=arguments),
        )


class ChatDialect(MessageDialect):
    """Whole answers and chunks as OpenAI's chat has them."""

    def whole(
        self, choices: Sequence[Choice], *, num_rows: Sequence[int] | None = None, put: Put = list
    ) -> ChatCompletion:
        """Return the whole answer, without the rows themselves."""
        return ChatCompletion(
            **self._head(),
            choices=[self._wire(each, put) for each in choices],
            usage=self.usage(choices),
            metadata=self.plan.metadata(self._stop_sequence_hit(choices[0])),
            prompt_token_ids=self._prompt_token_ids(),
            rows=UNSET if num_rows is None else list(num_rows),
        )

    def _wire(self, choice: Choice, put: Put) -> ChatChoice:
        assert choice.finish is not None
        generated = [token for token in choice.tokens if not token.is_prompt]
        has_ids = self.plan.wants_token_ids
        return ChatChoice(
            index=choice.index,
            message=self._message(choice),
            logprobs=self._logprobs(generated, put),
            finish_reason=self.finish_reason(choice),
            stop_reason=choice.finish.stop_reason,
            token_ids=[event.token_id for event in generated_events(choice)] if has_ids else UNSET,
            segments=self._segments(generated),
            token_stats=self._stats(choice),
        )

    # Streams.

    def first_chunk(self, choice: Choice, usage: Usage | None) -> ChatChunk:
        """Return the chunk with the role; the first of all also says what the numbers are."""
        is_first = choice.index == 0
        return self._chunk(
            ChatChunkChoice(index=choice.index, delta=ChatDelta(role="assistant", content="")),
            usage,
            metadata=self.plan.metadata() if is_first else UNSET,
            prompt_token_ids=self._prompt_token_ids() if is_first else UNSET,
        )

    def chunks(self, choice: Choice, tokens: Sequence[Token], usage: Usage | None) -> list[ChatChunk]:
        """Return one chunk for each run of tokens of the same segment."""
        found = []
        for segment, grouped in groupby(tokens, key=lambda token: token.segment):
            run = list(grouped)
            delta = ChatDelta() if segment is None else self._delta(choice.index, run)
            numbers = self._numbers(run)
            if "token_ids" in numbers:
                numbers["segments"] = self._segments(run)
            logprobs = None if segment is None else self._logprobs(run)
            extras = self._prompt_numbers(run)
            if delta == ChatDelta() and not numbers and logprobs is None and not extras:
                continue
            wire = ChatChunkChoice(index=choice.index, delta=delta, logprobs=logprobs, **numbers)
            found.append(self._chunk(wire, usage, **extras))
        return found

    def last_chunk(self, choice: Choice, usage: Usage | None) -> ChatChunk:
        """Return the chunk with the finish reason."""
        assert choice.finish is not None
        wire = ChatChunkChoice(
            index=choice.index,
            delta=ChatDelta(),
            finish_reason=self.finish_reason(choice),
            stop_reason=choice.finish.stop_reason,
        )
        is_first = choice.index == 0
        metadata = self.plan.metadata(self._stop_sequence_hit(choice)) if is_first else UNSET
        return self._chunk(wire, usage, metadata=metadata)

    def usage_chunk(self, usage: Usage) -> ChatChunk:
        """Return the chunk with the totals."""
        return ChatChunk(**self._head(), choices=[], usage=usage)

    def _chunk(self, wire: ChatChunkChoice, usage: Usage | None, **others: Any) -> ChatChunk:
        return ChatChunk(**self._head(), choices=[wire], usage=self._chunk_usage(usage), **others)
