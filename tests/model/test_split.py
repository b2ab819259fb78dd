"""Models whose layers lie in different places give what whole ones give, through the real batching path."""

import asyncio
import copy
import json
from dataclasses import replace
from pathlib import Path

import accelerate
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from engine import loading
from engine.config import EngineConfig
from engine.errors import LoadError
from engine.loading import load
from engine.memory import Room
from engine.packing import PackedLinear
from engine.runner import SlotRunner
from engine.types import GenerationRequest, RowDtype, SamplingParams
from tests.model.test_batching import TOLERANCE, Plan, Result, alone, drive
from tests.model.test_loading import checkpoint
from tests.model.tiny import tiny_model

pytestmark = pytest.mark.model

# Where the parts lie that are not told otherwise.
WHOLE = {
    "llama": ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head"],
    "gemma2": ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head"],
    "gpt2": [
        "transformer.wte",
        "transformer.wpe",
        "transformer.h.0",
        "transformer.h.1",
        "transformer.ln_f",
        "lm_head",
    ],
}
# A layer, the embedding and the head, and two tied ones away from the others.
ON_DISK = [
    ("llama", ["model.layers.1"]),
    ("llama", ["model.embed_tokens", "lm_head"]),
    ("gemma2", ["model.layers.0", "model.norm"]),
    ("gpt2", ["transformer.wte", "transformer.h.1", "lm_head"]),
]


def split(architecture: str, on_disk: list[str]) -> dict[str, str]:
    return {name: "disk" if name in on_disk else "cpu" for name in WHOLE[architecture]}


def plans() -> list[Plan]:
    """Return three requests of unequal lengths and settings that share their passes."""
    requests = [
        GenerationRequest(
            request_id="?",
            prompt_token_ids=tuple(text),
            max_tokens=12,
            sampling=sampling,
            seed=seed,
            stop=(),
            row_dtype=RowDtype.FLOAT32,
            logprobs=True,
        )
        for seed, (text, sampling) in enumerate(
            [
                (b"Once upon a time", SamplingParams(temperature=0)),
                (b"Once upon", SamplingParams(temperature=1.2, top_k=20)),
                (b"a", SamplingParams(temperature=0, repetition_penalty=1.5)),
            ]
        )
    ]
    return [Plan(each, arrives=turn, leaves=None, reads_every=1) for turn, each in enumerate(requests)]


def assert_same(architecture: str, runner: SlotRunner) -> None:
    got = asyncio.run(drive(runner, plans()))
    for plan, result in zip(plans(), got, strict=True):
        expected = alone(architecture, replace(plan, arrives=0))
        assert isinstance(result, Result)
        assert result.token_ids == expected.token_ids
        np.testing.assert_allclose(result.rows, expected.rows, atol=TOLERANCE)


@pytest.mark.parametrize(("architecture", "on_disk"), ON_DISK)
def test_layers_on_the_disk_change_nothing(tmp_path: Path, architecture: str, on_disk: list[str]) -> None:
    places = split(architecture, on_disk)
    config = EngineConfig(
        model_name=checkpoint(tmp_path / "model", architecture),
        device_map=json.dumps(places),
        offload_dir=str(tmp_path / "offload"),
        threads=1,
    )
    model, info = load(config)
    assert info.path == "batched"
    assert info.device_map == places
    assert isinstance(model.runner, SlotRunner)
    assert_same(architecture, model.runner)


def test_what_a_control_group_has_no_memory_for_goes_to_the_disk_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    weights = 4 * sum(each.numel() for each in tiny_model("llama").parameters())
    monkeypatch.setattr(loading, "room", lambda: Room(host=weights * 3 // 4, is_limited=True))
    model, info = load(
        EngineConfig(
            model_name=checkpoint(tmp_path / "model", "llama"),
            offload_dir=str(tmp_path / "offload"),
            threads=1,
        )
    )
    assert set(info.device_map.values()) == {"cpu", "disk"}
    assert "the model will be slow" in caplog.text
    assert isinstance(model.runner, SlotRunner)
    assert_same("llama", model.runner)


def offloaded(architecture: str) -> PreTrainedModel:
    """Return a model whose weights visit the device for their layer's turn only, as with a small GPU."""
    return accelerate.cpu_offload(
        copy.deepcopy(tiny_model(architecture)), execution_device=torch.device("cpu")
    )


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_layers_that_visit_the_device_change_nothing(architecture: str) -> None:
    model = offloaded(architecture)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert_same(architecture, SlotRunner(model, max_slots=3, max_tokens=128, budget_bytes=10**8))


def test_no_layer_of_a_split_model_is_packed(tmp_path: Path) -> None:
    config = EngineConfig(
        model_name=checkpoint(tmp_path / "model", "llama"),
        device_map=json.dumps(split("llama", ["model.layers.1"])),
        offload_dir=str(tmp_path / "offload"),
    )
    model, _ = load(config)
    assert isinstance(model.runner, SlotRunner)
    assert not any(isinstance(each, PackedLinear) for each in model.runner._forward._model.modules())


def test_a_map_that_leaves_layers_out_is_refused(tmp_path: Path) -> None:
    name = checkpoint(tmp_path, "llama")
    places = json.dumps({"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "cpu"})
    with pytest.raises(LoadError, match="lm_head"):
        load(EngineConfig(model_name=name, device_map=places, offload_dir=str(tmp_path / "offload")))
