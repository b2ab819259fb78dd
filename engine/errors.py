"""Everything that the engine raises on purpose.

EngineError
 ├─ RequestError: the caller asked for something that can never work
 │   ├─ InvalidRequestError
 │   └─ ContextLengthError
 ├─ UnavailableError: not now, perhaps later
 │   ├─ LoadingError
 │   ├─ QueueFullError
 │   └─ ShuttingDownError
 ├─ ModelFaultError: the model returned numbers that cannot be served
 │   ├─ NonFiniteLogitsError
 │   └─ LogitsOverflowError
 ├─ OutOfMemoryError
 ├─ StalledReaderError
 ├─ DeadlineError
 ├─ LoadError
 ├─ StepError
 └─ EngineDeadError

The engine knows no status codes; the service maps each class to one.
"""


class EngineError(Exception):
    """Base of the tree above."""


class RequestError(EngineError):
    """The request can never succeed as it stands; retrying it is useless."""


class InvalidRequestError(RequestError):
    """A value is wrong for this model or tokenizer."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(RequestError):
    """The prompt, or the prompt and the tokens asked for, do not fit the model's context."""

    def __init__(
        self, num_prompt_tokens: int, max_tokens: int | None, max_model_len: int, *, is_least: bool = False
    ) -> None:
        """State the three numbers.

        Args:
            num_prompt_tokens: Of the prompt.
            max_tokens: Those asked for; ``None`` if no number was.
            max_model_len: Of the model.
            is_least: The prompt has so many at least; nobody counted further.
        """
        asked = "" if max_tokens is None else f" and {max_tokens} tokens of completion were asked for"
        least = "at least " if is_least else ""
        super().__init__(
            f"the model's context is {max_model_len} tokens; the prompt has {least}{num_prompt_tokens}{asked}"
        )


class UnavailableError(EngineError):
    """The engine takes no request now; the same request may work later."""


class LoadingError(UnavailableError):
    """The model is still being loaded."""


class QueueFullError(UnavailableError):
    """As many requests wait as may wait."""


class ShuttingDownError(UnavailableError):
    """The engine is stopping, and takes or keeps no request."""


class ModelFaultError(EngineError):
    """The model returned a row that cannot be served as it is."""


class NonFiniteLogitsError(ModelFaultError):
    """A row holds NaN or positive infinity."""


class LogitsOverflowError(ModelFaultError):
    """A finite value of a row does not fit the wire's float16."""


class OutOfMemoryError(EngineError):
    """The device had no memory for this request; the engine goes on without it."""


class StalledReaderError(EngineError):
    """The reader took nothing for so long that its request was given up."""


class DeadlineError(EngineError):
    """The request waited and ran for longer than it may."""


class LoadError(EngineError):
    """The model or its tokenizer could not be loaded."""


class StepError(EngineError):
    """An unforeseen exception in a step; the original one is the cause."""


class EngineDeadError(EngineError):
    """The worker thread has ended; nothing will be served until a restart."""
