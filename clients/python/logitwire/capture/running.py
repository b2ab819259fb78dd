"""The running of a capture: several prompts at once, each tried until it is answered, failed, or hopeless."""

import asyncio
import random
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from logitwire.aio import AsyncClient, AsyncRowStream
from logitwire.capture.folder import Folder
from logitwire.capture.prompts import Prompt
from logitwire.capture.records import Answer, CaptureError, Failure, Settings, Source
from logitwire.capture.shards import ShardWriter, Spool
from logitwire.errors import (
    APIConnectionError,
    APIError,
    AuthenticationError,
    IncompleteStreamError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    RateLimitError,
)
from logitwire.results import Generation
from logitwire.retries import FIRST_DELAY_S

MAX_BROKEN = 3
"""How often an answer may break off before its prompt is given up, and the capture with it."""

HOPELESS = (
    APIConnectionError,
    AuthenticationError,
    IncompleteStreamError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    RateLimitError,
)
"""What the next prompt would meet as well. Anything else is the fault of one prompt."""

ENDING = ("shutting_down", "loading", "queue_full")
"""Codes of a server that takes no work now, where they come in the middle of an answer."""


@dataclass(slots=True)
class Counts:
    """How far a run is.

    Attributes:
        num_answers: Prompts that were answered.
        num_failures: Prompts that failed.
        num_rows: That came, also for answers that are not whole.
        num_bytes: Of their logits.
    """

    num_answers: int = 0
    num_failures: int = 0
    num_rows: int = 0
    num_bytes: int = 0


class Run:
    """One run over the prompts that are pending."""

    def __init__(self, client: AsyncClient, folder: Folder, writer: ShardWriter, counts: Counts) -> None:
        """Prepare.

        Args:
            client: Of the server.
            folder: Of the capture, opened.
            writer: Takes the answers; closed by the caller.
            counts: Kept up to date.
        """
        self._client = client
        self._folder = folder
        self._writer = writer
        self._counts = counts
        self._source = folder.source

    async def capture(self, prompts: Sequence[Prompt], concurrency: int) -> None:
        """Answer all prompts, ``concurrency`` at once.

        Raises:
            LogitwireError: The server cannot be used any more.
            CaptureError: It has become another one.
            OSError: The rows cannot be written.
        """
        waiting = iter(prompts)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(concurrency, len(prompts))):
                    group.create_task(self._work(waiting))
        except ExceptionGroup as errors:
            # The others come from tasks that the first one has stopped, or that met the same.
            raise _first(errors) from None

    async def _work(self, waiting: Iterator[Prompt]) -> None:
        for prompt in waiting:
            try:
                await self._answer(prompt)
            except HOPELESS:
                raise
            except APIError as error:
                if error.code in ENDING or self._is_for_all(error, prompt):
                    raise
                self._folder.add_failure(Failure.of(prompt.id, prompt.digest, error))
                self._counts.num_failures += 1

    def _is_for_all(self, error: APIError, prompt: Prompt) -> bool:
        """Tell whether a field is at fault that all prompts share."""
        return error.param in self._folder.settings.fields and error.param not in prompt.fields

    async def _answer(self, prompt: Prompt) -> None:
        num_broken = 0
        while True:
            try:
                return await self._try(prompt)
            except IncompleteStreamError:
                num_broken += 1
                if num_broken == MAX_BROKEN:
                    raise
                # Those that broke off together do not come back together.
                await asyncio.sleep(FIRST_DELAY_S * 2.0**num_broken * random.uniform(0.5, 1))  # noqa: S311

    async def _try(self, prompt: Prompt) -> None:
        counts = self._counts
        with Spool(self._folder.path) as spool:
            async with self._ask(prompt) as stream:
                async for row in stream:
                    spool.add(row)
                    counts.num_rows += 1
                    counts.num_bytes += 0 if row.logits is None else row.logits.nbytes
                result = stream.result
            schema = result._received.schema
            source = Source.of(result, schema)
            self._check_source(prompt, source)
            answer = Answer(
                id=prompt.id,
                digest=prompt.digest,
                num_rows=spool.num_rows,
                texts=[choice.text for choice in result.choices],
                finish_reasons=[choice.finish_reason for choice in result.choices],
                usage=result.usage,
            )
            await _finished(asyncio.to_thread(self._writer.add, answer, source, schema, spool))
        counts.num_answers += 1

    def _ask(self, prompt: Prompt) -> AsyncRowStream[Generation]:
        settings = self._folder.settings
        options: dict[str, Any] = {"logits": settings.logits, **settings.fields, **prompt.fields}
        content: Any = prompt.content
        if prompt.kind == "token_ids" or (prompt.kind == "prompt" and settings.raw):
            return self._client.complete_rows(content, **options)
        if prompt.kind == "prompt":
            content = [*_system(settings), {"role": "user", "content": content}]
        return self._client.chat_rows(content, **options)

    def _check_source(self, prompt: Prompt, source: Source) -> None:
        """Hold an answer against the first one."""
        if self._source is None:
            self._source = source
        elif difference := self._source.difference(source):
            raise CaptureError(
                f"the answer to {prompt.id!r} does not fit the others: {difference}; use another folder"
            )


async def _finished(writing: Coroutine[Any, Any, None]) -> None:
    """Wait for a thread to the end, also if the task is cancelled meanwhile: it uses what the task owns."""
    task = asyncio.ensure_future(writing)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def _system(settings: Settings) -> list[dict[str, str]]:
    return [] if settings.system is None else [{"role": "system", "content": settings.system}]


def _first(errors: BaseExceptionGroup[Any]) -> Exception:
    """Return the first error of a group, which may hold groups."""
    error: Any = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, Exception)
    return error
