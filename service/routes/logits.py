"""``POST /v1/logits``."""

import asyncio

from litestar import Request, post
from litestar.datastructures import State
from litestar.di import NamedDependency
from litestar.types import ASGIApp

from engine.engine import Engine
from schemas.scoring import LogitsRequest
from service.convert.scoring import check_logits, given_sequences, plan_logits
from service.metrics import Metrics
from service.negotiate import negotiate
from service.routes.body import read
from service.scoring import logits_answer_for
from service.settings import Settings


@post("/v1/logits", status_code=200, operation_id="createLogits")
async def create_logits(
    request: Request[object, object, State],
    engine: NamedDependency[Engine],
    metrics: NamedDependency[Metrics],
    settings: NamedDependency[Settings],
) -> ASGIApp:
    """Return rows for tokens that the request gives; nothing is generated."""
    form = negotiate(request.headers.get("accept"))
    asked = await read(request, LogitsRequest, engine, settings)
    check_logits(asked, form, engine.info, settings)
    given = await asyncio.to_thread(given_sequences, asked, engine.tokenizer, engine.info, settings)
    plan, requests = await asyncio.to_thread(plan_logits, asked, form, given, engine.info, settings)
    return logits_answer_for(form)(engine, metrics, plan, requests)
