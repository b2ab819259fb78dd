"""``GET /health``, ``/ready``, ``/metrics`` and ``/version``."""

from litestar import get
from litestar.di import NamedDependency

from engine.engine import Engine
from engine.errors import EngineError
from schemas.health import Health, Readiness, Version
from service.errors import NotReadyError
from service.metrics import CONTENT_TYPE, Metrics
from service.versions import versions


@get("/health", operation_id="health")
async def health() -> Health:
    """Tell that the process answers; says nothing of the model."""
    return Health()


@get("/ready", operation_id="ready")
async def ready(engine: NamedDependency[Engine]) -> Readiness:
    """Tell that the model is loaded and the last step succeeded; 503 with the reason otherwise."""
    try:
        engine.check_ready()
        if engine.last_failure is not None:
            raise engine.last_failure
    except EngineError as error:
        raise NotReadyError from error
    return Readiness(
        status="ready",
        model=engine.info.name,
        path=engine.info.path,
        running=engine.num_requests - engine.num_waiting,
        waiting=engine.num_waiting,
    )


@get("/metrics", operation_id="metrics", media_type=CONTENT_TYPE)
async def metrics(metrics: NamedDependency[Metrics]) -> bytes:
    """State counters and gauges in Prometheus' text format."""
    return metrics.text()


@get("/version", operation_id="version")
async def version() -> Version:
    """State the versions of everything that shapes logits."""
    return Version(**versions())
