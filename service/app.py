"""The composition root: every route, handler and dependency is registered here."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from litestar import Litestar
from litestar.di import Provide
from litestar.types import ASGIApp

from engine.engine import Engine
from service.cors import Cors, parse_origins
from service.errors import handle
from service.keys import KeyGuard
from service.limits import Leftovers
from service.metrics import Metrics
from service.openapi import document
from service.routes.chat import create_chat_completion
from service.routes.completions import create_completion
from service.routes.divergence import create_divergence
from service.routes.generate import (
    abort_requests,
    derender_chat,
    generate,
    render_chat,
    render_completion,
)
from service.routes.health import health, metrics, ready, version
from service.routes.logits import create_logits
from service.routes.models import list_models, retrieve_model
from service.routes.schema import get_asset, get_schema
from service.routes.tokenize import detokenize_prompt, get_tokenizer_info, tokenize_prompt
from service.settings import Settings, keys_of
from service.telemetry import RequestLog

ROUTES = (
    create_chat_completion,
    create_completion,
    generate,
    render_chat,
    render_completion,
    derender_chat,
    abort_requests,
    create_logits,
    create_divergence,
    list_models,
    retrieve_model,
    tokenize_prompt,
    detokenize_prompt,
    get_tokenizer_info,
    health,
    ready,
    metrics,
    version,
)
"""All that the OpenAPI document describes."""


def create_app(settings: Settings, engine: Engine) -> ASGIApp:
    """Return the application. It starts the engine's loading when it starts, and stops it when it stops.

    Raises:
        SettingsError: The file of keys is not there, or has none.
    """

    @asynccontextmanager
    async def lifespan(_: Litestar) -> AsyncIterator[None]:
        engine.start()
        yield
        await engine.stop()

    counters = Metrics(engine, settings.served_model_name)
    described = document(ROUTES)
    app: ASGIApp = Litestar(
        route_handlers=[*ROUTES, get_schema, get_asset],
        dependencies={
            "engine": Provide(lambda: engine, sync_to_thread=False),
            "settings": Provide(lambda: settings, sync_to_thread=False),
            "metrics": Provide(lambda: counters, sync_to_thread=False),
            "document": Provide(lambda: described, sync_to_thread=False),
        },
        exception_handlers={Exception: handle},
        lifespan=[lifespan],
        logging_config=None,
        request_max_body_size=settings.max_body_bytes,
        openapi_config=None,
    )
    if keys := keys_of(settings):
        app = KeyGuard(app, keys)
    app = Leftovers(app)
    if origins := parse_origins(settings.cors_origins):
        app = Cors(app, origins)
    return RequestLog(app, counters, logs_texts=settings.log_prompts)
