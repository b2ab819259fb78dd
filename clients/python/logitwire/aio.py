"""The asynchronous client: one event loop, any number of answers at once."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from ssl import SSLContext
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, Unpack

import pyarrow as pa

from logitwire import calls
from logitwire.calls import JsonCall, RowsCall
from logitwire.config import MAX_IDLE, load_config
from logitwire.connection import Connection, connect
from logitwire.errors import APIConnectionError, APIError, APITimeoutError, LogitwireError
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

Result = TypeVar("Result")


class AsyncClient:
    """Talks to one server, as :class:`logitwire.Client` does, from tasks of one event loop.

    A task that is cancelled ends its work at the server.
    """

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
        self._idle: list[Connection] = []
        self._sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections that are kept for the next calls; running calls go on."""
        while (connection := self._take()) is not None:
            connection.abort()
        # The loop closes them with its next turn.
        await asyncio.sleep(0)

    async def chat(
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
        return await self._run(calls.chat(messages, logits, options))

    def chat_rows(
        self,
        messages: Sequence[Message],
        *,
        logits: LogitsDtype | None = "float16",
        keep: bool = False,
        **options: Unpack[ChatOptions],
    ) -> "AsyncRowStream[Generation]":
        """Continue a conversation, and give out its rows while the server generates; see :meth:`chat`.

        Args:
            messages: OpenAI's messages.
            logits: The dtype of the rows; ``None`` asks for none.
            keep: Whether the result at the end has the rows too, which takes memory for all of them.
            **options: Any other field of the request.
        """
        return AsyncRowStream(self, calls.chat(messages, logits, options), keep=keep)

    async def complete(
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
        return await self._run(calls.complete(prompt, logits, options))

    def complete_rows(
        self,
        prompt: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        *,
        logits: LogitsDtype | None = "float16",
        keep: bool = False,
        **options: Unpack[CompleteOptions],
    ) -> "AsyncRowStream[Generation]":
        """Continue a prompt, and give out the rows while the server generates.

        See :meth:`complete` and :meth:`chat_rows`.
        """
        return AsyncRowStream(self, calls.complete(prompt, logits, options), keep=keep)

    async def generate(
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
        return await self._run(calls.generate(token_ids, logits, options))

    def generate_rows(
        self,
        token_ids: Sequence[int],
        *,
        logits: LogitsDtype | None = "float16",
        keep: bool = False,
        **options: Unpack[GenerateOptions],
    ) -> "AsyncRowStream[Generation]":
        """Continue token ids, and give out the rows while the server generates.

        See :meth:`generate` and :meth:`chat_rows`.
        """
        return AsyncRowStream(self, calls.generate(token_ids, logits, options), keep=keep)

    async def score(
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
        return await self._run(calls.score(sequences, logits, options))

    def score_rows(
        self,
        sequences: Sequence[Context],
        *,
        logits: LogitsDtype | None = "float16",
        keep: bool = False,
        **options: Unpack[ScoreOptions],
    ) -> "AsyncRowStream[list[Score]]":
        """Give out the rows that predict given tokens, as soon as the server has them.

        See :meth:`score` and :meth:`chat_rows`. ``choice`` of a row is the index of its sequence.
        """
        return AsyncRowStream(self, calls.score(sequences, logits, options), keep=keep)

    async def divergence(
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
        return await self._run(calls.divergence(p, q, completion, options))

    async def _run(self, call: RowsCall[Result] | JsonCall[Result]) -> Result:
        connection = await self._open(call, keeps=True, gives=False)
        result: Result = connection.result
        self._release(connection)
        return result

    async def _open(
        self, call: RowsCall[Result] | JsonCall[Result], *, keeps: bool, gives: bool
    ) -> Connection:
        """Return the connection of an answer whose first batch has come, or that is over."""
        num_retries = 0
        while True:
            try:
                return await self._attempt(call, keeps=keeps, gives=gives)
            except (APIError, APIConnectionError) as error:
                delay_s = retry_delay_s(error, num_retries, self._config.max_retries)
                if delay_s is None:
                    raise
            num_retries += 1
            await self._sleep(delay_s)

    async def _attempt(
        self, call: RowsCall[Result] | JsonCall[Result], *, keeps: bool, gives: bool
    ) -> Connection:
        """Try once. A kept connection that the server has closed meanwhile does not count."""
        if (kept := self._take()) is not None:
            try:
                return await self._converse(
                    kept, Exchange(call, self._config, keeps=keeps, gives=gives), gives=gives
                )
            except APITimeoutError:
                raise
            except APIConnectionError:
                pass
        connection = await connect(self._config)
        return await self._converse(
            connection, Exchange(call, self._config, keeps=keeps, gives=gives), gives=gives
        )

    async def _converse(
        self, connection: Connection, exchange: Exchange[Result], *, gives: bool
    ) -> Connection:
        try:
            await connection.converse(exchange, gives=gives)
        except BaseException:
            self._release(connection)
            raise
        return connection

    def _take(self) -> Connection | None:
        """Return a kept connection of this loop that the server has not closed, if there is one."""
        loop = asyncio.get_running_loop()
        while self._idle:
            connection = self._idle.pop()
            if connection.loop is loop and not connection.is_lost:
                return connection
        return None

    def _release(self, connection: Connection) -> None:
        """Keep or close a connection whose exchange is over, or given up."""
        if connection.may_follow and len(self._idle) < MAX_IDLE:
            self._idle.append(connection)
        else:
            connection.abort()


class AsyncRowStream(Generic[Result]):
    """Rows of one answer, each as soon as the server has it.

    The request is sent with the first row asked for. Closing the stream, or leaving its ``async with`` block,
    before its end ends the work at the server. An answer that is not whole raises where its rows end.

    Attributes:
        schema: Of the stream, with its metadata; ``None`` before the first row.
    """

    def __init__(self, client: AsyncClient, call: RowsCall[Result], *, keep: bool) -> None:
        self.schema: pa.Schema | None = None
        self._client = client
        self._call = call
        self._keeps = keep
        self._connection: Connection | None = None
        self._is_over = False
        self._ready: deque[Row] = deque()
        self._results: list[Result] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Row:
        """Return the next row.

        Raises:
            APIError: The server refused or failed the request.
            APIConnectionError: There was no answer.
            IncompleteStreamError: The answer broke off.
            RuntimeError: The stream was closed before its end, or has raised before.
        """
        while not self._ready:
            if self._results:
                raise StopAsyncIteration
            if self._is_over:
                raise RuntimeError("the stream failed or was closed")
            try:
                if self._connection is None:
                    self._connection = await self._client._open(self._call, keeps=self._keeps, gives=True)
                batch = await self._connection.take()
            except LogitwireError:
                self._give_up()
                raise
            if batch is None:
                self._results.append(self._connection.result)
                self._give_up()
            else:
                self.schema = batch.schema
                self._ready.extend(calls.rows_of(batch))
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

    async def close(self) -> None:
        """End the work at the server, if it still goes on."""
        self._ready.clear()
        self._give_up()

    def __del__(self) -> None:
        if getattr(self, "_connection", None) is not None:
            self._give_up()

    def _give_up(self) -> None:
        self._is_over = True
        if self._connection is not None:
            self._client._release(self._connection)
            self._connection = None
