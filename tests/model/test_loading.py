"""Loading checkpoints from a folder, as MODEL_NAME does."""

import asyncio
import importlib.util
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from engine import loading
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import LoadError
from engine.fake import byte_tokenizer
from engine.loading import load
from engine.memory import Room
from engine.packing import PackedLinear
from engine.runner import SlotRunner
from service.server import run
from service.settings import Settings
from tests.model.tiny import COMMON, tiny_model

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
    assert (info.name, info.path, info.vocab_size, info.tokenizer_vocab_size) == (
        tmp_path.name,
        path,
        320,
        261,
    )
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
    with pytest.raises(LoadError, match="there is no such folder"):
        load(EngineConfig(model_name=str(tmp_path / "nothing")))


def enormous(folder: Path) -> str:
    """Save the configuration of a model that fits no machine, and no weights."""
    sizes = {"hidden_size": 65536, "intermediate_size": 262144, "num_hidden_layers": 90}
    LlamaConfig(**sizes, vocab_size=320, dtype="bfloat16").save_pretrained(folder)
    return str(folder)


def test_a_model_that_cannot_fit_ends_the_server_with_the_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = Settings(model_name=enormous(tmp_path), port=0)
    # There is no weight to read, so it was refused before.
    assert asyncio.run(run(settings, Engine(settings.engine_config(), load))) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("logitwire: ")]
    for part in ("cannot fit", "billion parameters in bfloat16", "host ", "QUANTIZATION=4bit"):
        assert part in line


def test_an_estimate_can_be_overruled(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="no file named"):
        load(EngineConfig(model_name=enormous(tmp_path), check_memory=False))


def packed_layers(name: str) -> int:
    model, _ = load(EngineConfig(model_name=name))
    assert isinstance(model.runner, SlotRunner)
    return sum(isinstance(each, PackedLinear) for each in model.runner._forward._model.modules())


def test_weights_are_packed_only_where_the_memory_holds_them_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = checkpoint(tmp_path, "llama")
    assert packed_layers(name) == 15
    weights = 4 * sum(each.numel() for each in tiny_model("llama").parameters())
    kv = 256 * 2 * 2 * 2 * 8 * 4
    monkeypatch.setattr(loading, "room", lambda: Room(host=weights + kv))
    assert packed_layers(name) == 0
    monkeypatch.setattr(loading, "room", lambda: Room(host=weights + kv - 1))
    with pytest.raises(LoadError, match="cannot fit"):
        load(EngineConfig(model_name=name))


def test_the_cache_leaves_a_small_machine_a_fifth_of_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A token of this model takes 256 bytes.
    config = EngineConfig(model_name=checkpoint(tmp_path, "llama"), check_memory=False)
    monkeypatch.setattr(loading, "room", lambda: Room(host=100 * 256))
    assert load(config)[1].max_model_len == 80


@pytest.mark.parametrize("kind", ["4bit", "8bit"])
def test_a_quantized_model_runs_batched_and_quietly(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    # Wider than a block of 64 weights, which share a scale.
    sizes = {**COMMON, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    tiny = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes), dtype=torch.bfloat16)
    tiny.save_pretrained(tmp_path)
    byte_tokenizer()._tokenizer.save_pretrained(tmp_path)
    model, info = load(EngineConfig(model_name=str(tmp_path), quantization=kind))
    assert (info.path, info.dtype) == ("batched", "bfloat16")
    assert isinstance(model.runner, SlotRunner)
    kinds = {type(each).__name__ for each in model.runner._forward._model.modules()}
    assert {"4bit": "Linear4bit", "8bit": "Linear8bitLt"}[kind] in kinds
    assert "MatMul" not in caplog.text


def test_quantization_without_bitsandbytes_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "bitsandbytes" else find_spec(name, *rest),
    )
    with pytest.raises(LoadError, match="QUANTIZATION=4bit needs bitsandbytes.*pip install"):
        load(EngineConfig(model_name=checkpoint(tmp_path, "llama"), quantization="4bit"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch has a GPU here")
def test_gpus_that_torch_cannot_use_are_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    monkeypatch.setattr(loading.logger, "warning", lambda text, **more: said.append((text, more["extra"])))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    load(EngineConfig(model_name=checkpoint(tmp_path, "llama")))
    assert said == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    load(EngineConfig(model_name=checkpoint(tmp_path, "llama")))
    assert said == [("torch sees none of the GPUs", {"asked": "0,1", "torch": torch.__version__})]
