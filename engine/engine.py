"""The async face of the engine. It owns the worker thread and the inbox; callers stay on the event loop."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable
from enum import StrEnum
from functools import partial
from itertools import chain

from engine.config import EngineConfig
from engine.errors import (
    ContextLengthError,
    EngineDeadError,
    EngineError,
    InvalidRequestError,
    LoadError,
    LoadingError,
    OutOfMemoryError,
    QueueFullError,
    ShuttingDownError,
    StepError,
)
from engine.grammar import Grammar, GrammarCompiler, GrammarSpec
from engine.inbox import Abort, Cancel, Inbox, Stop, Submit
from engine.outbox import Outbox
from engine.stats import Stats
from engine.tokenizer import Tokenizer
from engine.types import GenerationRequest, ModelInfo
from engine.worker import Model, Worker

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 30.0

Load = Callable[[EngineConfig], tuple[Model, ModelInfo]]


class EngineState(StrEnum):
    """Where the engine is in its life."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    DEAD = "dead"


class Engine:
    """Takes requests and gives out their events.

    Attributes:
        state: Where it is in its life; written on the event loop only.
        last_failure: What went wrong in the last step; ``None`` after a good one.
        loaded_at: When the model was ready, in seconds since the epoch.
        stats: What it has done.
    """

    def __init__(self, config: EngineConfig, load: Load) -> None:
        self.config = config
        self.state = EngineState.LOADING
        self.last_failure: EngineError | None = None
        self.loaded_at = 0
        self.stats = Stats()
        self._load = load
        self._inbox = Inbox(config.max_queue)
        self._outboxes: dict[str, Outbox] = {}
        self._whole_only: set[str] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._settled = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._load_error: LoadError | None = None
        self._info: ModelInfo | None = None
        self._tokenizer: Tokenizer | None = None
        self._grammars: GrammarCompiler | None = None
        self._worker: Worker | None = None

    # Life.

    def start(self) -> None:
        """Start the worker thread, which loads the model; returns at once. Needs a running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._work, name="logitwire-worker", daemon=True)
        self._thread.start()

    async def wait_ready(self) -> ModelInfo:
        """Wait until the model is loaded.

        Raises:
            LoadError: It could not be loaded.
        """
        await self._settled.wait()
        if self._load_error is not None:
            raise self._load_error
        return self.info

    async def drain(self, timeout_s: float) -> None:
        """Take no new request, and wait until those that are there have ended, or the time is over."""
        if self.state is EngineState.READY:
            self.state = EngineState.DRAINING
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            logger.warning(
                "requests were left at the end of the drain", extra={"requests": len(self._outboxes)}
            )

    async def stop(self) -> None:
        """End the worker; requests that are left fail."""
        if self.state is not EngineState.DEAD:
            self.state = EngineState.STOPPED
        self._inbox.send(Stop())
        if self._thread is not None and self._settled.is_set():
            await asyncio.to_thread(self._thread.join, JOIN_TIMEOUT_S)

    # Facts.

    @property
    def is_working(self) -> bool:
        """Tell whether the worker thread is alive."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def is_loaded(self) -> bool:
        """Tell whether there is a model."""
        return self._info is not None

    @property
    def info(self) -> ModelInfo:
        """Facts of the model.

        Raises:
            LoadingError: It is not loaded yet.
        """
        if self._info is None:
            raise LoadingError("the model is still being loaded")
        return self._info

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, which any thread may use.

        Raises:
            LoadingError: It is not loaded yet.
        """
        if self._tokenizer is None:
            raise LoadingError("the model is still being loaded")
        return self._tokenizer

    @property
    def num_waiting(self) -> int:
        """Requests that wait to run."""
        return self._inbox.num_waiting

    @property
    def num_running(self) -> int:
        """Sequences that run."""
        return 0 if self._worker is None else self._worker.num_running

    @property
    def kv_usage(self) -> float:
        """Share of the KV cache that running sequences fill, 0 to 1; 0 where it has no limit."""
        return 0.0 if self._worker is None else self._worker.kv_usage

    @property
    def num_requests(self) -> int:
        """Requests that wait, run, or have events that nobody took."""
        return len(self._outboxes)

    def check_ready(self) -> None:
        """Raise what keeps the engine from taking requests, if anything does.

        Raises:
            LoadingError: The model is still being loaded.
            ShuttingDownError: The engine drains or has stopped.
            EngineDeadError: The worker has ended.
        """
        match self.state:
            case EngineState.LOADING:
                raise LoadingError("the model is still being loaded")
            case EngineState.DRAINING | EngineState.STOPPED:
                raise ShuttingDownError("the server is shutting down")
            case EngineState.DEAD:
                # What loading says is full of paths, and belongs into the log.
                is_unloaded = isinstance(self.last_failure, LoadError)
                reason = "the model could not be loaded" if is_unloaded else self.last_failure
                raise EngineDeadError(f"the engine is dead: {reason}")
            case EngineState.READY:
                return

    # Requests.

    def submit(self, request: GenerationRequest) -> Outbox:
        """Queue a request; returns where its events will come. Always pair with :meth:`cancel`.

        Raises:
            InvalidRequestError: The prompt is empty, an id is not in the vocabulary, or two contexts were to
                be compared and only one can run at once.
            ContextLengthError: Prompt and completion do not fit the context.
            QueueFullError: As many requests wait as may wait.
            LoadingError, ShuttingDownError, EngineDeadError: As :meth:`check_ready`.
        """
        self.check_ready()
        self._check(request)
        if request.request_id in self._outboxes:
            raise InvalidRequestError("another request of this id has not ended yet", "request_id")
        outbox = Outbox(self.config.outbox_bytes, self._inbox.wake)
        try:
            self._inbox.submit(Submit(request, outbox, time.perf_counter()))
        except QueueFullError:
            self.stats.num_refused += 1
            raise
        self._outboxes[request.request_id] = outbox
        if request.max_tokens == 0:
            # Part of what was asked for about given tokens is no answer.
            self._whole_only.add(request.request_id)
        self._idle.clear()
        return outbox

    def compile_grammar(
        self, spec: GrammarSpec, param: str | None = None, *, after: str | None = None
    ) -> Grammar:
        """Return a grammar that requests may have. Takes up to seconds: not for the event loop.

        Raises:
            InvalidRequestError: As :meth:`engine.grammar.GrammarCompiler.compile`.
            LoadingError: The model is not loaded yet.
        """
        if self._grammars is None:
            raise LoadingError("the model is still being loaded")
        return self._grammars.compile(spec, param, after=after)

    def cancel(self, request_id: str) -> None:
        """Forget a request, whether it has ended or not. The worker drops it at the next step."""
        self._whole_only.discard(request_id)
        if self._outboxes.pop(request_id, None) is not None:
            self._inbox.send(Cancel(request_id))
        if not self._outboxes:
            self._idle.set()

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """End requests at the next step; their readers get what there is so far.

        Args:
            request_ids: As callers named them: those of the requests, or what stands before their ``-N``.

        Returns:
            Those that were there.
        """
        asked = dict.fromkeys(request_ids)
        found = set()
        for name in self._outboxes.keys() - self._whole_only:
            if own := asked.keys() & {name, name.rpartition("-")[0]}:
                self._inbox.send(Abort(name))
                found |= own
        return [each for each in asked if each in found]

    def _check(self, request: GenerationRequest) -> None:
        num_prompt_tokens = len(request.prompt_token_ids)
        if num_prompt_tokens == 0:
            raise InvalidRequestError("the prompt has no tokens", "prompt")
        vocab_size = self.info.vocab_size
        ids_by_name: dict[str, Iterable[int]] = {
            "prompt": request.prompt_token_ids,
            "stop_token_ids": request.stop_token_ids,
            "logit_token_ids": request.logit_token_ids,
            "logprob_token_ids": request.logprob_token_ids,
            "prompt_logprob_token_ids": chain.from_iterable(request.prompt_logprob_token_ids),
            "prompt_columns": chain.from_iterable(request.prompt_columns),
            "contrast": () if request.contrast is None else request.contrast.token_ids,
            "logit_bias": (token_id for token_id, _ in request.sampling.logit_bias),
        }
        for name in ("logit_token_ids", "logprob_token_ids"):
            if len(getattr(request, name)) > vocab_size:
                raise InvalidRequestError(f"there are only {vocab_size} different token ids", name)
        for name, ids in ids_by_name.items():
            if bad := [each for each in ids if not 0 <= each < vocab_size]:
                raise InvalidRequestError(f"token id {bad[0]} is not in 0..{vocab_size - 1}", name)
        max_model_len = self.info.max_model_len
        # Without max_tokens there must be room for one token at least.
        needed = 1 if request.max_tokens is None else request.max_tokens
        if num_prompt_tokens + needed > max_model_len:
            raise ContextLengthError(num_prompt_tokens, request.max_tokens, max_model_len)
        contrast = request.contrast
        if contrast is None:
            return
        assert contrast.token_ids[contrast.start :] == request.prompt_token_ids[request.prompt_start :]
        if len(contrast.token_ids) > max_model_len:
            raise ContextLengthError(len(contrast.token_ids), None, max_model_len)
        if self.config.max_batch_size < 2:
            raise InvalidRequestError("needs two sequences at once, and MAX_BATCH_SIZE is 1")

    # The worker thread.

    def _work(self) -> None:
        """Load, then step; the thread's whole life."""
        try:
            model, info = self._load(self.config)
        except LoadError as error:
            logger.error("loading failed", exc_info=error.__cause__, extra={"failure": str(error)})
            self._on_loop(partial(self._loaded, None, None, error))
            return
        except BaseException as error:
            failure = LoadError(f"loading failed with {type(error).__name__}: {error}")
            self._on_loop(partial(self._loaded, None, None, failure))
            raise
        self._grammars = GrammarCompiler(model.tokenizer, info.vocab_size, model.eos_token_ids)
        self._on_loop(partial(self._loaded, info, model.tokenizer, None))
        self._worker = Worker(self.config, model, self._inbox, self._on_loop, self._stepped, stats=self.stats)
        try:
            self._worker.run()
        except BaseException as error:
            logger.critical("the worker died", exc_info=error)
            dead = EngineDeadError(f"the worker died of {type(error).__name__}")
            self._on_loop(partial(self._died, dead))

    def _on_loop(self, function: Callable[[], None]) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function)

    def _loaded(self, info: ModelInfo | None, tokenizer: Tokenizer | None, error: LoadError | None) -> None:
        self._info, self._tokenizer, self._load_error = info, tokenizer, error
        if error is not None:
            self.state, self.last_failure = EngineState.DEAD, error
        elif self.state is EngineState.LOADING:
            self.state = EngineState.READY
        self.loaded_at = int(time.time())
        self._settled.set()

    def _died(self, failure: EngineDeadError) -> None:
        self.state, self.last_failure = EngineState.DEAD, failure

    def _stepped(self, failure: EngineError | None) -> None:
        """Keep how the last step went; a request's own fault does not count against the engine."""
        self.last_failure = failure if isinstance(failure, StepError | OutOfMemoryError) else None
