"""The synchronous client."""

import socket
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from ssl import SSLContext
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, Unpack

import pyarrow as pa

from logitwire import calls
from logitwire.arrow import Batch
from logitwire.calls import JsonCall, RowsCall
from logitwire.config import load_config
from logitwire.errors import APIConnectionError, APIError, APITimeoutError
from logitwire.exchange import Exchange
from logitwire.options import (
    ChatOptions,
    CompleteOptions,
    Context,
    DivergenceOptions,
    GenerateOptions,
    LogitsDtype,
    Message,
    ScoreOptions,
)
from logitwire.results import Divergence, Generation, Row, Score
from logitwire.retries import retry_delay_s
from logitwire.sockets import Idle, connect, receive, send

Result = TypeVar("Result")


class Client:
    """Talks to one server. Threads may share a client: each running call has a connection of its own."""

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        max_retries: int = 2,
        ssl_context: SSLContext | None = None,
    ) -> None:
        """Remember where the server is; connects only when called.

        Args:
            base_url: Such as ``http://127.0.0.1:8000``, which is the default; a trailing ``/v1`` is allowed.
                ``None`` takes LOGITWIRE_BASE_URL, if that is set.
            api_key: Sent as a bearer token. ``None`` takes LOGITWIRE_API_KEY, if that is set.
            timeout_s: Seconds to wait for the next bytes at most.
            max_retries: How often a call is tried again at most; see :mod:`logitwire.retries`.
            ssl_context: For https; ``None`` trusts what the system trusts.

        Raises:
            ValueError: The address is no http or https URL, or a number is out of its range.
        """
        self._config = load_config(
            base_url, api_key, timeout_s=timeout_s, max_retries=max_retries, context=ssl_context
        )
        self._idle = Idle()
        self._sleep: Callable[[float], None] = time.sleep

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_idle"):
            self.close()

    def close(self) -> None:
        """Close the connections that are kept for the next calls; running calls go on."""
        self._idle.close()

    def chat(
        self,
        messages: Sequence[Message],
        *,
        logits: LogitsDtype | None = "float16",
        **options: Unpack[ChatOptions],
    ) -> Generation:
        """Continue a conversation, and return it with its rows.

        Args:
            messages: OpenAI's messages.
            logits: The dtype of the rows; ``None`` asks for none.
            **options: Any other field of the request, such as ``max_tokens``, ``temperature`` or ``seed``.

        Raises:
            ValueError: ``logits`` is none of its values.
            APIError: The server refused or failed the request.
            APIConnectionError: There was no answer.
            IncompleteStreamError: The answer broke off.
        """
        return self._run(calls.chat(messages, logits, options))

    def chat_rows(
        self,
        messages: Sequence[Message],
        *,
        logits: LogitsDtype | None = "float16",
        keep: bool = False,
        **options: Unpack[ChatOptions],
    ) -> "RowStream[Generation]":
        """Continue a conversation, and give out its rows while the server generates; see :meth:`chat`.

        Args:
            messages: OpenAI's messages.
            logits: The dtype of the rows; ``None`` asks for none.
            keep: Whether the result at the end has the rows too, which takes memory for all of them.
            **options: Any other field of the request.
        """
        return RowStream(self, calls.chat(messages, logits, options), keep=keep)

    def complete(
        self,
        prompt: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        *,
        logits: LogitsDtype | None = "float16",
        **options: Unpack[CompleteOptions],
    ) -> Generation:
        """Continue a text or token ids, and return what follows with its rows.

        Args:
            prompt: A text, the ids of one prompt, or a list of such; the completions of further prompts are
                in ``others``.
            logits: The dtype of the rows; ``None`` asks for none.
            **options: Any other field of the request, such as ``echo`` or ``return_prompt_logits``.

        Raises:
            ValueError: ``logits`` is none of its values.
            APIError: The server refused or failed the request.
            APIConnectionError: There was no answer.
            IncompleteStreamError: The answer broke off.
        """
        return self._run(calls.complete(prompt, logits, options))

    def complete_rows(
        self,
        prompt: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        *,
        logits: LogitsDtype | None = "float16",
        keep: bool = False,
        **options: Unpack[CompleteOptions],
    ) -> "RowStream[Generation]":
        """Continue a prompt, and give out the rows while the server generates.

        See :meth:`complete` and :meth:`chat_rows`.
        """
        return RowStream(self, calls.complete(prompt, logits, options), keep=keep)

    def generate(
        self,
        token_ids: Sequence[int],
        *,
        logits: LogitsDtype | None = "float16",
        **options: Unpack[GenerateOptions],
    ) -> Generation:
        """Continue token ids, as vLLM's route of this name does: no template, no text unless asked for.

        Args:
            token_ids: The prompt.
            logits: The dtype of the rows; ``None`` asks for none.
            **options: Any other field of the request, such as ``output_mode``; the sampling fields may also
                stand in ``sampling_params``. Without ``max_tokens`` the context is filled.

        Raises:
            ValueError: ``logits`` is none of its values.
            APIError: The server refused or failed the request.
            APIConnectionError: There was no answer.
            IncompleteStreamError: The answer broke off.
        """
        return self._run(calls.generate(token_ids, logits, options))

    def generate_rows(
        self,
        token_ids: Sequence[int],
        *,
        logits: LogitsDtype | None = "float16",
        keep: bool = False,
        **options: Unpack[GenerateOptions],
    ) -> "RowStream[Generation]":
        """Continue token ids, and give out the rows while the server generates.

        See :meth:`generate` and :meth:`chat_rows`.
        """
        return RowStream(self, calls.generate(token_ids, logits, options), keep=keep)

    def score(
        self,
        sequences: Sequence[Context],
        *,
        logits: LogitsDtype | None = "float16",
        **options: Unpack[ScoreOptions],
    ) -> list[Score]:
        """Return the rows that predict given tokens; nothing is generated.

        Args:
            sequences: 1 to 64, each a text, token ids, a conversation, or the wire's object:
                ``{"token_ids": [...]}``, ``{"text": "..."}`` or ``{"messages": [...], "completion":
                "..."}``, to which ``prompt_length`` may be added: tokens that are context only.
            logits: The dtype of the rows; ``None`` asks for none.
            **options: Any other field of the request, such as ``range``, ``next_token``, ``token_stats``,
                ``top_logprobs`` or ``logit_token_ids``.

        Returns:
            One result per sequence, in their order.

        Raises:
            ValueError: ``logits`` is none of its values.
            TypeError: ``sequences`` is a single one.
            APIError: The server refused or failed the request.
            APIConnectionError: There was no answer.
            IncompleteStreamError: The answer broke off.
        """
        return self._run(calls.score(sequences, logits, options))

    def score_rows(
        self,
        sequences: Sequence[Context],
        *,
        logits: LogitsDtype | None = "float16",
        keep: bool = False,
        **options: Unpack[ScoreOptions],
    ) -> "RowStream[list[Score]]":
        """Give out the rows that predict given tokens, as soon as the server has them.

        See :meth:`score` and :meth:`chat_rows`. ``choice`` of a row is the index of its sequence.
        """
        return RowStream(self, calls.score(sequences, logits, options), keep=keep)

    def divergence(
        self,
        p: Context,
        q: Context,
        completion: str | Sequence[int] | Mapping[str, Any] | None = None,
        **options: Unpack[DivergenceOptions],
    ) -> Divergence:
        """Compare what two contexts say of the same tokens, at the server: no row travels.

        The server answers when all is computed, so there is no stream; the result can be iterated.

        Args:
            p: A text, token ids, a conversation, or the wire's object.
            q: Likewise.
            completion: The tokens that follow both, as text or ids; ``None`` generates them from ``p``,
                greedily unless a sampling field is given.
            **options: Any other field of the request: ``log_base`` is 2 or "e", ``temperature`` is applied to
                both rows before they are compared.

        Raises:
            APIError: The server refused or failed the request.
            APIConnectionError: There was no answer.
            IncompleteStreamError: The answer broke off.
        """
        return self._run(calls.divergence(p, q, completion, options))

    def _run(self, call: RowsCall[Result] | JsonCall[Result]) -> Result:
        running = self._batches(call, keeps=True, gives=False)
        try:
            while True:
                next(running)
        except StopIteration as stop:
            result: Result = stop.value
            return result

    def _batches(
        self, call: RowsCall[Result] | JsonCall[Result], *, keeps: bool, gives: bool
    ) -> Generator[Batch, None, Result]:
        """Give out the batches of an answer as they come, and return its result."""
        num_retries = 0
        while True:
            try:
                return (yield from self._attempt(call, keeps=keeps, gives=gives))
            except (APIError, APIConnectionError) as error:
                # One that comes behind the first batch is never retried, since it has no status.
                delay_s = retry_delay_s(error, num_retries, self._config.max_retries)
                if delay_s is None:
                    raise
            num_retries += 1
            self._sleep(delay_s)

    def _attempt(
        self, call: RowsCall[Result] | JsonCall[Result], *, keeps: bool, gives: bool
    ) -> Generator[Batch, None, Result]:
        """Try once. A kept connection that the server has closed meanwhile does not count."""
        if (connection := self._idle.take()) is not None:
            exchange = Exchange(call, self._config, keeps=keeps, gives=gives)
            try:
                return (yield from self._converse(connection, exchange))
            except APITimeoutError:
                raise
            except APIConnectionError:
                pass
        exchange = Exchange(call, self._config, keeps=keeps, gives=gives)
        return (yield from self._converse(connect(self._config), exchange))

    def _converse(
        self, connection: socket.socket, exchange: Exchange[Result]
    ) -> Generator[Batch, None, Result]:
        """Send a request and read its answer; whatever ends it, the connection is kept or closed."""
        try:
            send_error = send(connection, exchange.request)
            answering = exchange.answer()
            received: int | None = None
            while True:
                item = answering.send(received)
                if not isinstance(item, memoryview):
                    yield item
                    received = None
                    continue
                try:
                    received = receive(connection, item, exchange.spare)
                except OSError as error:
                    cause = send_error or error
                    raise exchange.failure(cause) from cause
        except StopIteration as stop:
            result: Result = stop.value
            return result
        finally:
            if exchange.may_follow:
                self._idle.put(connection)
            else:
                connection.close()


class RowStream(Generic[Result]):
    """Rows of one answer, each as soon as the server has it.

    The request is sent with the first row asked for. Closing the stream, or leaving its ``with`` block,
    before its end ends the work at the server. An answer that is not whole raises where its rows end. A
    stream belongs to one thread.

    Attributes:
        schema: Of the stream, with its metadata; ``None`` before the first row.
    """

    def __init__(self, client: Client, call: RowsCall[Result], *, keep: bool) -> None:
        self.schema: pa.Schema | None = None
        self._running = client._batches(call, keeps=keep, gives=True)
        self._ready: deque[Row] = deque()
        self._results: list[Result] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Row:
        """Return the next row.

        Raises:
            APIError: The server refused or failed the request.
            APIConnectionError: There was no answer.
            IncompleteStreamError: The answer broke off.
            RuntimeError: The stream was closed before its end, or has raised before.
        """
        while not self._ready:
            try:
                batch = next(self._running)
                self.schema = batch.schema
                self._ready.extend(calls.rows_of(batch))
            except StopIteration as stop:
                if stop.value is not None:
                    self._results.append(stop.value)
                if not self._results:
                    raise RuntimeError("the stream failed or was closed") from None
                raise
        return self._ready.popleft()

    @property
    def result(self) -> Result:
        """Return the whole answer, once all rows were read; it has the rows themselves only with ``keep``.

        Raises:
            RuntimeError: There are rows left, or the stream failed or was closed.
        """
        if not self._results:
            raise RuntimeError("the result is there when all rows were read")
        return self._results[0]

    def close(self) -> None:
        """End the work at the server, if it still goes on."""
        self._ready.clear()
        self._running.close()
