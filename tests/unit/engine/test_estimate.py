"""What a checkpoint needs, from its configuration alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.config import EngineConfig
from engine.estimate import Need, estimate

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def configuration(folder: Path, architecture: str = "llama", **values: Any) -> str:
    """Save a configuration without weights."""
    AutoConfig.for_model(architecture, **{**SIZES, **values}).save_pretrained(folder)
    return str(folder)


def needed(path: str, **config: Any) -> Need:
    need = estimate(path, EngineConfig(**config))
    assert need is not None
    return need


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2", "qwen3_moe"])
def test_the_estimate_counts_what_is_allocated(tmp_path: Path, architecture: str) -> None:
    path = configuration(tmp_path, architecture)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.float32)
    allocated = sum(each.numel() for each in model.parameters())
    need = needed(path, dtype="float32")
    assert need.num_parameters == allocated
    assert need.weights == {"": 4 * allocated}
    assert needed(path, dtype="bfloat16").weights == {"": 2 * allocated}


def test_quantized_layers_count_less_and_the_head_does_not(tmp_path: Path) -> None:
    path = configuration(tmp_path)
    plain = needed(path, dtype="bfloat16").weights[""]
    linear = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64)
    assert needed(path, dtype="bfloat16", quantization="8bit").weights[""] == plain - linear
    assert needed(path, dtype="bfloat16", quantization="4bit").weights[""] == plain - linear * (2 - 0.5625)


def test_each_place_of_a_forced_map_is_counted(tmp_path: Path) -> None:
    places = '{"model.embed_tokens": "cpu", "model.layers": 0, "model.norm": "cuda:1", "lm_head": "1"}'
    need = needed(configuration(tmp_path), dtype="float32", device_map=places)
    assert need.weights["cpu"] == 4 * 320 * 32
    assert need.weights["cuda:1"] == 4 * (320 * 32 + 32)
    assert sum(need.weights.values()) == 4 * need.num_parameters


def test_only_float32_weights_are_packed(tmp_path: Path) -> None:
    path = configuration(tmp_path)
    assert needed(path, dtype="float32").packable == 4 * (
        2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64) + 320 * 32
    )
    assert needed(path, dtype="bfloat16").packable == 0


def test_a_token_of_the_cache_has_keys_and_values_of_each_attention_layer(tmp_path: Path) -> None:
    assert needed(configuration(tmp_path / "a"), dtype="float32").kv_per_token == 2 * 2 * 2 * 8 * 4
    hybrid = configuration(tmp_path / "b", "qwen3_next", layer_types=["linear_attention", "full_attention"])
    assert needed(hybrid, dtype="bfloat16").kv_per_token == 2 * 1 * 2 * 8 * 2


def test_a_checkpoint_that_is_quantized_already_is_estimated_by_its_files(tmp_path: Path) -> None:
    path = configuration(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4})
    assert estimate(path, EngineConfig()) is None
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    assert needed(path).weights == {"": 900}
    (tmp_path / "model.safetensors.index.json").write_text('{"metadata": {"total_size": 5000}}')
    assert needed(path, device_map="cpu").weights == {"cpu": 4500}
