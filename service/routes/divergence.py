"""``POST /v1/divergence``."""

import asyncio

from litestar import Request, post
from litestar.datastructures import State
from litestar.di import NamedDependency
from litestar.types import ASGIApp

from engine.engine import Engine
from schemas.scoring import DivergenceRequest
from service.convert.divergence import check_divergence, plan_divergence
from service.metrics import Metrics
from service.negotiate import negotiate
from service.routes.body import read
from service.scoring import DivergenceJsonAnswer
from service.settings import Settings


@post("/v1/divergence", status_code=200, operation_id="createDivergence")
async def create_divergence(
    request: Request[object, object, State],
    engine: NamedDependency[Engine],
    metrics: NamedDependency[Metrics],
    settings: NamedDependency[Settings],
) -> ASGIApp:
    """Tell how far two contexts' distributions of the same tokens are apart."""
    negotiate(request.headers.get("accept"), has_arrow=False)
    asked = await read(request, DivergenceRequest, engine, settings)
    check_divergence(asked)
    comparison = await asyncio.to_thread(plan_divergence, asked, engine.tokenizer, engine.info, settings)
    return DivergenceJsonAnswer(engine, metrics, comparison)
