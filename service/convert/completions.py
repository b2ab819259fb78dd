"""Legacy completions: requests to prompts and plans, tokens to texts and chunks."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from engine.errors import ContextLengthError
from engine.grammar import Grammar
from engine.tokenizer import Tokenizer
from engine.types import GenerationRequest, ModelInfo, TokenEvent, TopLogprobs
from schemas.base import TokenId
from schemas.completions import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest
from schemas.logits import Usage
from service.convert.choice import Choice, Echo, Token, text_offsets
from service.convert.dialect import MIN_LOGPROB, Dialect, Put, generated_events
from service.convert.plan import Plan, check_fields, check_top_logprobs, plan_answer
from service.errors import Problem, ProblemsError
from service.negotiate import Representation
from service.settings import Settings

MAX_LOGPROBS = 5
"""OpenAI's limit."""

DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""


# Requests.


def check_completion(
    request: CompletionRequest, form: Representation, settings: Settings
) -> list[str | list[int]]:
    """Refuse what is not supported, and combinations that contradict each other.

    Returns:
        The prompts, each a text or ids.

    Raises:
        ProblemsError: With every problem found.
    """
    problems = check_fields(request, form, settings)
    problems += check_top_logprobs(request.logprobs, MAX_LOGPROBS, settings, "logprobs")
    if request.suffix:
        problems.append(Problem("unsupported_parameter", "text cannot be inserted", "suffix"))
    if request.best_of not in (None, 1):
        problems.append(Problem("unsupported_parameter", "only 1 is supported; use n", "best_of"))
    prompts: list[str | list[int]] = []
    is_list = (
        isinstance(request.prompt, list) and request.prompt and isinstance(request.prompt[0], str | list)
    )
    if is_list and len(request.prompt) * (request.n or 1) > settings.max_queue:
        message = f"each completion waits in the queue, which holds {settings.max_queue}"
        problems.append(Problem("invalid_value", message, "prompt"))
    else:
        prompts, prompt_problems = _prompts(request.prompt)
        problems += prompt_problems
    if problems:
        raise ProblemsError(problems)
    return prompts


def _prompts(raw: str | list[Any]) -> tuple[list[str | list[int]], list[Problem]]:
    """Return the prompts of any of the four forms, and what is wrong with them."""
    if isinstance(raw, str):
        return [raw], []
    if not raw:
        return [], [Problem("invalid_value", "must not be empty", "prompt")]
    if not isinstance(raw[0], str | list):
        raw = [raw]
        paths = ["prompt"]
    else:
        paths = [f"prompt[{place}]" for place in range(len(raw))]
    prompts: list[str | list[int]] = []
    problems = []
    for prompt, path in zip(raw, paths, strict=True):
        if isinstance(prompt, str) and isinstance(raw[0], str):
            prompts.append(prompt)
        elif not isinstance(prompt, list) or isinstance(raw[0], str):
            problems.append(Problem("invalid_value", "prompts are all texts or all lists of token ids", path))
        elif not prompt:
            problems.append(Problem("invalid_value", "must not be empty", path))
        else:
            try:
                prompts.append(msgspec.convert(prompt, list[TokenId]))
            except msgspec.ValidationError:
                ids, fault = _checked_ids(prompt, path)
                prompts.append(ids)
                problems += fault
    return prompts, problems


def _checked_ids(prompt: Sequence[Any], path: str) -> tuple[list[int], list[Problem]]:
    """Return ids of which some are whole floats, or what is wrong with the first that is none."""
    ids = [_as_id(each) for each in prompt]
    if None not in ids:
        return [each for each in ids if each is not None], []
    message = "expected a token id, a whole number from 0"
    return [], [Problem("invalid_value", message, f"{path}[{ids.index(None)}]")]


def _as_id(value: Any) -> int | None:
    """Return a token id, which may be written as a whole float; ``None`` for anything else."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    is_id = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31
    return value if is_id else None


def completion_prompts(
    request: CompletionRequest, prompts: Sequence[str | list[int]], tokenizer: Tokenizer, info: ModelInfo
) -> list[Echo]:
    """Return each prompt's ids, and its tokens' texts if it is to be echoed.

    Takes long for long prompts: not for the event loop.

    Raises:
        ContextLengthError: A text cannot fit the context, however well it is tokenised.
        ProblemsError: An id is not in the vocabulary, or an empty text has no start token to stand for it.
    """
    found = []
    for place, prompt in enumerate(prompts):
        path = f"prompt[{place}]" if len(prompts) > 1 else "prompt"
        if isinstance(prompt, str):
            least = -(-len(prompt) // tokenizer.max_token_length)
            if least > info.max_model_len:
                raise ContextLengthError(least, request.max_tokens, info.max_model_len, is_least=True)
            ids = tokenizer.encode(prompt, add_special_tokens=request.add_special_tokens is not False)
            if not ids:
                ids = [start_token(tokenizer, path)]
        else:
            ids = prompt
            if bad := [each for each in ids if each >= info.vocab_size]:
                message = f"token id {bad[0]} is not in 0..{info.vocab_size - 1}"
                raise ProblemsError([Problem("invalid_value", message, path)])
        texts: list[str] = []
        if request.echo:
            texts = tokenizer.texts(ids)
            if isinstance(prompt, str) and tokenizer.is_special(ids[0]) and not prompt.startswith(texts[0]):
                # A start token that the tokenizer added is no part of the text.
                texts[0] = ""
        offsets = text_offsets(tokenizer, ids, texts) if texts else []
        found.append(Echo(tuple(ids), tuple(texts), tuple(offsets), wants_entries(request)))
    return found


def start_token(tokenizer: Tokenizer, path: str) -> int:
    """Return the token that stands for an empty text.

    Raises:
        ProblemsError: The model has none.
    """
    for token_id in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return token_id
    message = "is empty, and this model has no start token"
    raise ProblemsError([Problem("invalid_value", message, path)])


def wants_entries(request: CompletionRequest) -> bool:
    """Tell whether the JSON answer holds logprobs; 0 asks for the chosen tokens' alone."""
    return request.logprobs is not None or bool(request.return_logprobs)


def _max_tokens(request: CompletionRequest, prompts: Sequence[Echo], info: ModelInfo) -> int:
    """Return the tokens asked for; the usual number, as far as there is room, if none was."""
    if request.max_tokens is not None:
        return request.max_tokens
    room = info.max_model_len - max(len(prompt.token_ids) for prompt in prompts)
    return max(1, min(DEFAULT_MAX_TOKENS, room))


def plan_completion(
    request: CompletionRequest,
    form: Representation,
    prompts: Sequence[Echo],
    info: ModelInfo,
    settings: Settings,
    *,
    grammar: Grammar | None,
) -> tuple[Plan, list[GenerationRequest]]:
    """Return what to answer, and what to generate: one engine request per choice.

    Raises:
        ServiceError: ``logit_budget_exceeded``.
    """
    return plan_answer(
        request,
        form,
        [prompt.token_ids for prompt in prompts],
        info,
        settings,
        kind="text_completion",
        max_tokens=_max_tokens(request, prompts, info),
        wants_entries=wants_entries(request),
        num_top_logprobs=request.logprobs or 0,
        num_prompt_top_logprobs=(request.logprobs or 0) if request.echo and wants_entries(request) else None,
        grammar=grammar,
    )


# Answers.


def _logprob(event: TokenEvent) -> float:
    assert event.logprob is not None
    return max(event.logprob, MIN_LOGPROB)


class CompletionDialect(Dialect):
    """Texts and parallel lists as OpenAI's legacy completions have them."""

    def __init__(self, plan: Plan, tokenizer: Tokenizer, echoes: Sequence[Echo] | None) -> None:
        """Prepare.

        Args:
            plan: Of the answer.
            tokenizer: The model's.
            echoes: The prompts, if they are part of the text.
        """
        super().__init__(plan, tokenizer)
        self._echoes = echoes

    def choice(
        self, index: int, *, keeps_tokens: bool = True, keeps_rows: bool = False, waits_for_text: bool = True
    ) -> Choice:
        """Return an empty completion."""
        return Choice(
            index,
            self.tokenizer,
            echo=self._echo_of(index),
            has_offsets=self.plan.wants_entries,
            keeps_tokens=keeps_tokens,
            keeps_rows=keeps_rows,
            # Offsets into the text are known with the text only.
            waits_for_text=waits_for_text or self.plan.wants_entries,
        )

    def _echo_of(self, choice: int) -> Echo | None:
        return None if self._echoes is None else self._echoes[choice // self.plan.choices_per_prompt]

    def whole(
        self, choices: Sequence[Choice], *, num_rows: Sequence[int] | None = None, put: Put = list
    ) -> Completion:
        """Return the whole answer, without the rows themselves."""
        return Completion(
            **self._head(),
            choices=[self._wire(each, put) for each in choices],
            usage=self.usage(choices),
            metadata=self.plan.metadata(self._stop_sequence_hit(choices[0])),
            prompt_token_ids=self._prompt_token_ids() if len(self.plan.prompts) == 1 else UNSET,
            rows=UNSET if num_rows is None else list(num_rows),
        )

    def _wire(self, choice: Choice, put: Put) -> CompletionChoice:
        assert choice.finish is not None
        has_ids, has_many = self.plan.wants_token_ids, len(self.plan.prompts) > 1
        return CompletionChoice(
            index=choice.index,
            text=choice.content,
            logprobs=self._logprobs(choice, choice.tokens, put),
            finish_reason=self.finish_reason(choice),
            stop_reason=choice.finish.stop_reason,
            token_ids=[event.token_id for event in generated_events(choice)] if has_ids else UNSET,
            token_stats=self._stats(choice),
            prompt_token_ids=self._prompt_token_ids(choice.index) if has_many else UNSET,
        )

    def _prompt_token_ids(self, choice: int = 0) -> list[int] | UnsetType:
        return list(self.plan.prompt_of(choice)) if self.plan.wants_token_ids else UNSET

    def finish_reason(self, choice: Choice) -> Literal["stop", "length", "abort"]:
        """Return why an ended choice has ended."""
        assert choice.finish is not None
        return choice.finish.reason.value

    def _logprobs(
        self, choice: Choice, tokens: Sequence[Token], put: Put = list
    ) -> CompletionLogprobs | None:
        """Return the entries of tokens, those of an echoed prompt included."""
        if not self.plan.wants_entries:
            return None
        echo = self._echo_of(choice.index)
        # Without an echo the prompt's tokens have no entries; with one, only its first has no numbers.
        own = [token for token in tokens if echo is not None or not token.is_prompt]
        first = echo.token_ids[0] if echo is not None else 0
        ids = [first if token.event is None else token.event.token_id for token in own]
        return CompletionLogprobs(
            tokens=[self._token_text(each) for each in ids],
            token_logprobs=[None if token.event is None else _logprob(token.event) for token in own],
            top_logprobs=put(None if token.event is None else self._top(token.event) for token in own),
            text_offset=[token.offset for token in own],
        )

    def _top(self, event: TokenEvent) -> dict[str, float]:
        """Return the alternatives of one position by their strings, the chosen token among them."""
        token = self._token_text(event.token_id)
        best = event.top_logprobs or TopLogprobs([], [])
        # The chosen token has its string to itself, wherever it ranks; of others with one string, the best.
        names = {token: event.token_id}
        for token_id in best.token_ids:
            names.setdefault(self._token_text(token_id), token_id)
        top: dict[str, float] = {}
        for token_id, value in zip(best.token_ids, best.logprobs, strict=True):
            text = self._token_text(token_id)
            top[text if names[text] == token_id else f"token_id:{token_id}"] = max(value, MIN_LOGPROB)
        top.setdefault(token, _logprob(event))
        return top

    # Streams.

    def first_chunk(self, choice: Choice, usage: Usage | None) -> Completion | None:
        """Return the chunk with the prompt's ids, if they are wanted."""
        has_one = len(self.plan.prompts) == 1
        if not self.plan.wants_token_ids or (has_one and choice.index):
            return None
        ids = self._prompt_token_ids(choice.index)
        if has_one:
            return self._chunk(self._part(choice, ""), usage, prompt_token_ids=ids)
        return self._chunk(self._part(choice, "", prompt_token_ids=ids), usage)

    def chunks(self, choice: Choice, tokens: Sequence[Token], usage: Usage | None) -> list[Completion]:
        """Return one chunk for each run of tokens of the same segment."""
        found = []
        for segment, grouped in groupby(tokens, key=lambda token: token.segment):
            run = list(grouped)
            text = "".join(token.content for token in run)
            logprobs = self._logprobs(choice, run)
            if logprobs is not None and not logprobs.tokens:
                logprobs = None
            numbers, extras = self._numbers(run), self._prompt_numbers(run) if segment is None else {}
            if not (text or logprobs or numbers or extras):
                continue
            if len(self.plan.prompts) > 1:
                numbers, extras = numbers | extras, {}
            found.append(self._chunk(self._part(choice, text, logprobs=logprobs, **numbers), usage, **extras))
        return found

    def last_chunk(self, choice: Choice, usage: Usage | None) -> Completion:
        """Return the chunk with the finish reason."""
        assert choice.finish is not None
        wire = CompletionChoice(
            index=choice.index,
            text="",
            logprobs=None,
            finish_reason=self.finish_reason(choice),
            stop_reason=choice.finish.stop_reason,
        )
        is_first = choice.index == 0
        metadata = self.plan.metadata(self._stop_sequence_hit(choice)) if is_first else UNSET
        return self._chunk(wire, usage, metadata=metadata)

    def usage_chunk(self, usage: Usage) -> Completion:
        """Return the chunk with the totals."""
        return Completion(**self._head(), choices=[], usage=usage)

    def _part(
        self, choice: Choice, text: str, *, logprobs: CompletionLogprobs | None = None, **others: Any
    ) -> CompletionChoice:
        return CompletionChoice(
            index=choice.index, text=text, logprobs=logprobs, finish_reason=None, **others
        )

    def _chunk(self, wire: CompletionChoice, usage: Usage | None, **others: Any) -> Completion:
        return Completion(**self._head(), choices=[wire], usage=self._chunk_usage(usage), **others)
