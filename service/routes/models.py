"""``GET /v1/models`` and ``GET /v1/models/{id}``."""

from litestar import get
from litestar.di import NamedDependency
from litestar.params import FromPath

from engine.engine import Engine
from schemas.models import ModelCard, ModelList
from service.errors import ServiceError, echo
from service.settings import Settings


def _card(engine: Engine, settings: Settings) -> ModelCard:
    info = engine.info
    return ModelCard(
        id=settings.served_model_name or info.name,
        created=engine.loaded_at,
        owned_by="logitwire",
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        tokenizer_vocab_size=info.tokenizer_vocab_size,
        dtype=info.dtype,
    )


@get("/v1/models", operation_id="listModels")
async def list_models(engine: NamedDependency[Engine], settings: NamedDependency[Settings]) -> ModelList:
    """List the served model."""
    return ModelList(data=[_card(engine, settings)])


@get("/v1/models/{model_id:path}", operation_id="retrieveModel")
async def retrieve_model(
    model_id: FromPath[str], engine: NamedDependency[Engine], settings: NamedDependency[Settings]
) -> ModelCard:
    """Describe one model; its id may hold slashes, plain or encoded."""
    card = _card(engine, settings)
    if str(model_id).strip("/") != card.id.strip("/"):
        raise ServiceError("model_not_found", f"there is no model {echo(str(model_id).strip('/'))}", "model")
    return card
