"""One completion on its way out: events of the engine become tokens with all that belongs to them.

A stream sends these tokens as they come, and a whole answer is made of the same ones, so both say the same.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from engine.outbox import Event
from engine.segments import Piece, Segment, Segmenter, ToolCallPart
from engine.tokenizer import Tokenizer
from engine.types import Finish, TokenEvent


@dataclass(frozen=True, slots=True)
class Token:
    """One token that may be sent: its own text, and everything else that the request wants of it.

    Attributes:
        event: The engine's; ``None`` for what an echoed prompt has without numbers.
        segment: What it is part of; ``None`` for a token of the prompt.
        content, reasoning: What it adds to the text.
        tool_parts: What it adds to tool calls.
        offset: Code points of the returned text before it.
    """

    event: TokenEvent | None
    segment: Segment | None
    content: str = ""
    reasoning: str = ""
    tool_parts: tuple[ToolCallPart, ...] = ()
    offset: int = 0

    @property
    def is_prompt(self) -> bool:
        """Tell whether it is a token of the prompt."""
        return self.segment is None


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that is part of the returned text.

    Attributes:
        texts: The own texts of its tokens.
        offsets: Code points before each of them.
        has_entries: Whether each of its tokens has an entry; else its text is sent as a whole.
    """

    token_ids: tuple[int, ...]
    texts: tuple[str, ...]
    offsets: tuple[int, ...]
    has_entries: bool


@dataclass(frozen=True, slots=True)
class Splitting:
    """How the tokens of a chat are split into segments.

    Attributes:
        segmenter: Makes the state of one completion.
        hides_reasoning: Leave out reasoning and its markers: text, entries, ids and rows.
        is_single_call: Give out the first tool call only.
    """

    segmenter: Callable[[], Segmenter]
    hides_reasoning: bool = False
    is_single_call: bool = False


class Choice:
    """Gathers the events of one completion.

    Attributes:
        tokens: All that were given out, where the answer needs them again; without their rows, unless those
            are kept too.
        num_tokens: Generated, hidden ones included.
        num_reasoning_tokens: Of those, the ones that are reasoning.
        num_rows, num_row_bytes: Whole rows that came, and their size.
        finish: The end, once it is there.
    """

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        *,
        splitting: Splitting | None = None,
        echo: Echo | None = None,
        has_offsets: bool = False,
        keeps_tokens: bool = True,
        keeps_rows: bool = False,
        waits_for_text: bool = True,
    ) -> None:
        """Prepare an empty completion.

        Args:
            index: Its number in the answer.
            tokenizer: The model's.
            splitting: How tokens are split into segments; ``None`` knows content and special tokens only.
            echo: The prompt, if it is returned.
            has_offsets: Whether tokens need their offsets; not where they are split.
            keeps_tokens: Whether tokens are needed after they have been given out.
            keeps_rows: Whether their rows are, too.
            waits_for_text: Whether a token waits until all its text is final; else it is given out at once,
                without text.
        """
        self.index = index
        self.tokens: list[Token] = []
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.num_rows = 0
        self.num_row_bytes = 0
        self.finish: Finish | None = None
        self.tool_calls: list[tuple[str, str]] = []
        self._tokenizer = tokenizer
        self._splitting = splitting
        self._segmenter = splitting.segmenter() if splitting else None
        self._echo = echo
        self._has_offsets = has_offsets
        self._keeps_tokens = keeps_tokens
        self._keeps_rows = keeps_rows
        self._waits_for_text = waits_for_text or splitting is not None
        self._untold: deque[int] = deque()
        self._undecided: deque[TokenEvent] = deque()
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._num_characters = 0
        self._num_prompt_given = 0

    @property
    def content(self) -> str:
        """The visible text so far, an echoed prompt included."""
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        """The reasoning so far, unless it is hidden."""
        return "".join(self._reasoning)

    def opening(self) -> list[Token]:
        """Return what comes before any event: the echoed prompt, or its first token."""
        if self._echo is None:
            return []
        if not self._echo.has_entries:
            return self._given_out([self._prompt_token(None, "".join(self._echo.texts))])
        return self._given_out([self._prompt_token(None, self._echo.texts[0])])

    def add(self, events: Sequence[Event]) -> list[Token]:
        """Take events in their order; return the tokens that may be sent now."""
        tokens: list[Token] = []
        for event in events:
            if isinstance(event, Finish):
                self.finish = event
                tokens += self._told(event.texts)
                if self._segmenter is not None:
                    tokens += self._decided(self._segmenter.finish(), 0)
                continue
            self.num_rows += event.row is not None
            self.num_row_bytes += 0 if event.row is None else event.row.nbytes
            if event.is_prompt:
                tokens.append(self._prompt_event(event))
                continue
            self.num_tokens += 1
            self._untold.append(event.token_id)
            if self._waits_for_text:
                self._undecided.append(event)
            else:
                tokens.append(Token(event, self._plain_segment(event.token_id)))
            tokens += self._told(event.texts)
        return self._given_out(tokens)

    def close(self) -> list[Token]:
        """End without an event; return the tokens that were left."""
        return self._given_out(list(self._decided(self._segmenter.finish(), 0)) if self._segmenter else [])

    def _told(self, texts: Sequence[str]) -> list[Token]:
        """Take the texts of the next tokens; return the tokens that are decided with them."""
        tokens: list[Token] = []
        ids = [self._untold.popleft() for _ in texts]
        for token_id, text, offset in zip(ids, texts, self._offsets(ids, texts), strict=True):
            tokens += self._decided(self._pieces(token_id, text), offset)
        return tokens

    def _offsets(self, token_ids: Sequence[int], texts: Sequence[str]) -> Sequence[int]:
        """Return the code points before each of some tokens, if anybody looks at them."""
        if not self._has_offsets:
            return [0] * len(texts)
        return text_offsets(self._tokenizer, token_ids, texts, start=self._num_characters)

    def _pieces(self, token_id: int, text: str) -> list[Piece]:
        if self._segmenter is not None:
            return self._segmenter.push(token_id, text)
        return [Piece(self._plain_segment(token_id), content=text)]

    def _plain_segment(self, token_id: int) -> Segment:
        return Segment.SPECIAL if self._tokenizer.is_special(token_id) else Segment.CONTENT

    def _decided(self, pieces: Sequence[Piece], offset: int) -> Iterator[Token]:
        """Add the text of decided tokens, and return those tokens if they have waited for it.

        Args:
            pieces: One per token.
            offset: Of the only one of them; where a segmenter may hold back tokens there are no offsets.
        """
        hides = self._splitting is not None and self._splitting.hides_reasoning
        is_single = self._splitting is not None and self._splitting.is_single_call
        for piece in pieces:
            self.num_reasoning_tokens += piece.segment is Segment.REASONING
            reasoning = "" if hides else piece.reasoning
            parts = tuple(part for part in piece.tool_parts if not is_single or part.index == 0)
            self._add_content(piece.content)
            if reasoning:
                self._reasoning.append(reasoning)
            for part in parts:
                self._add_call_part(part)
            if self._waits_for_text:
                event = self._undecided.popleft()
                # A token in which the reasoning ends and the content begins is content.
                if not (hides and piece.of_reasoning):
                    yield Token(event, piece.segment, piece.content, reasoning, parts, offset)

    def _add_content(self, text: str) -> None:
        if text:
            self._content.append(text)
            self._num_characters += len(text)

    def _add_call_part(self, part: ToolCallPart) -> None:
        if part.index == len(self.tool_calls):
            self.tool_calls.append((part.name or "", ""))
        name, arguments = self.tool_calls[part.index]
        self.tool_calls[part.index] = (name, arguments + part.arguments)

    def _prompt_event(self, event: TokenEvent) -> Token:
        """Return a token of the prompt; its text counts if the prompt is echoed token by token."""
        if self._echo is None or not self._echo.has_entries:
            return Token(event, None)
        return self._prompt_token(event, self._echo.texts[self._num_prompt_given + 1])

    def _prompt_token(self, event: TokenEvent | None, text: str) -> Token:
        assert self._echo is not None
        if event is not None:
            self._num_prompt_given += 1
        token = Token(event, None, text, offset=self._echo.offsets[self._num_prompt_given])
        self._add_content(text)
        return token

    def _given_out(self, tokens: list[Token]) -> list[Token]:
        if self._keeps_tokens:
            self.tokens += tokens if self._keeps_rows else map(_without_rows, tokens)
        return tokens


def _without_rows(token: Token) -> Token:
    """Return a token that holds no row."""
    event = token.event
    if event is None or (event.row is None and event.stats is None and event.selected is None):
        return token
    return replace(token, event=replace(event, row=None, stats=None, selected=None))


def text_offsets(
    tokenizer: Tokenizer, token_ids: Sequence[int], texts: Sequence[str], *, start: int = 0
) -> list[int]:
    """Return the code points before each token; all parts of a split character share that of the character.

    Args:
        tokenizer: Knows the bytes of each token.
        token_ids: Of the tokens.
        texts: Their own texts. The last part of a split character has all of it, and what stands before it in
            the first part.
        start: Code points before the first of them.
    """
    offsets: list[int] = []
    parts: list[bytes] = []
    for token_id, text in zip(token_ids, texts, strict=True):
        is_part = not text and not tokenizer.is_special(token_id)
        parts.append(tokenizer.token_bytes(token_id))
        if is_part:
            continue
        whole = text.encode()
        if len(parts) > 1 and b"".join(parts) == whole:
            ends = accumulate(map(len, parts[:-1]), initial=0)
            offsets += [start + len(whole[:end].decode(errors="ignore")) for end in ends]
        else:
            offsets += [start] * len(parts)
        start += len(text)
        parts.clear()
    return offsets + [start] * len(parts)
