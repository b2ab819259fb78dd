"""What every route with a body does first."""

import asyncio
from functools import partial

from litestar import Request
from litestar.datastructures import State

from engine.engine import Engine
from engine.no_tokenizer import WHY
from service.decode import Nested, T, check_content_type, check_model, decode, read_body
from service.errors import ServiceError
from service.settings import Settings

QUICK_BYTES = 2**15
"""A body of this size is read in less than a few milliseconds, whatever it holds."""


async def read(
    request: Request[object, object, State],
    kind: type[T],
    engine: Engine,
    settings: Settings,
    nested: Nested | None = None,
    *,
    text_field: str | None = None,
) -> T:
    """Return the body of a request for work. A large one is read on a thread.

    Args:
        request: What came.
        kind: What the route takes.
        engine: Must be ready.
        settings: Of the server.
        nested: As for :func:`service.decode.decode`.
        text_field: The field for whose sake the route needs a tokenizer, if it needs one.

    Raises:
        ServiceError: It is no JSON by its content type, or names another model.
        ProblemsError: It is not what the route takes.
        EngineError: The engine takes no work.
    """
    check_content_type(request.headers.get("content-type"))
    body = await read_body(request)
    work = partial(decode, kind, body, ignore_unknown=settings.unknown_fields == "ignore", nested=nested)
    asked = work() if len(body) <= QUICK_BYTES else await asyncio.to_thread(work)
    engine.check_ready()
    check_model(getattr(asked, "model", None), settings.served_model_name or engine.info.name)
    if text_field is not None:
        require_tokenizer(engine, text_field)
    return asked


def require_tokenizer(engine: Engine, field: str | None) -> None:
    """Refuse what needs texts on a server that has none.

    Raises:
        ServiceError: ``unsupported_parameter``.
    """
    if not engine.tokenizer.has_text:
        raise ServiceError("unsupported_parameter", WHY, field)
