"""Loading checkpoints from a folder, as MODEL_NAME does."""

import json
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.errors import LoadError
from engine.fake import byte_tokenizer
from engine.loading import load
from tests.model.tiny import tiny_model

pytestmark = pytest.mark.model


def checkpoint(folder: Path, architecture: str, **generation: object) -> str:
    """Save a tiny model and the byte tokenizer as a checkpoint."""
    tiny_model(architecture).save_pretrained(folder)
    byte_tokenizer()._tokenizer.save_pretrained(folder)
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **generation}))
    return str(folder)


@pytest.mark.parametrize(
    ("architecture", "path"), [("llama", "batched"), ("gemma2", "batched"), ("qwen3_next", "one_at_a_time")]
)
def test_a_checkpoint_is_loaded_on_the_path_that_suits_it(
    tmp_path: Path, architecture: str, path: str
) -> None:
    name = checkpoint(tmp_path, architecture)
    model, info = load(EngineConfig(model_name=name))
    assert (info.name, info.path, info.vocab_size, info.tokenizer_vocab_size) == (name, path, 320, 261)
    assert (info.dtype, info.max_model_len, info.device_map) == ("float32", 512, {"": "cpu"})
    assert model.tokenizer.render_chat([{"role": "user", "content": "x"}])


def test_end_tokens_of_all_places_count(tmp_path: Path) -> None:
    model, _ = load(EngineConfig(model_name=checkpoint(tmp_path, "llama", eos_token_id=[5, 7])))
    assert model.eos_token_ids == {5, 7, byte_tokenizer().eos_token_id}


def test_a_context_may_be_shortened_but_not_lengthened(tmp_path: Path) -> None:
    name = checkpoint(tmp_path, "llama")
    assert load(EngineConfig(model_name=name, max_model_len=100))[1].max_model_len == 100
    with pytest.raises(LoadError, match="MAX_MODEL_LEN is 513"):
        load(EngineConfig(model_name=name, max_model_len=513))


def test_the_kv_budget_shortens_the_context_unless_one_was_asked_for(tmp_path: Path) -> None:
    name = checkpoint(tmp_path, "llama")
    # Two layers, keys and values, two heads of eight float32 each.
    budget = 300 * 2 * 2 * 2 * 8 * 4
    assert load(EngineConfig(model_name=name, kv_cache_bytes=budget))[1].max_model_len == 300
    with pytest.raises(LoadError, match="hold only 300 tokens"):
        load(EngineConfig(model_name=name, kv_cache_bytes=budget, max_model_len=400))


def test_what_is_no_checkpoint_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=str(tmp_path)):
        load(EngineConfig(model_name=str(tmp_path)))
