import re
from pathlib import Path

import pytest

from engine.config import EngineConfig, parse_device_map
from service.settings import Settings, SettingsError, load_settings, near_misses, settings_table


def test_an_empty_environment_gives_the_defaults() -> None:
    assert load_settings({}) == Settings()
    assert load_settings({"MODEL_NAME": "", "PORT": ""}) == Settings()
    assert Settings().engine_config() == EngineConfig()


def test_variables_are_read_by_type() -> None:
    settings = load_settings(
        {
            "PORT": "80",
            "TRUST_REMOTE_CODE": "true",
            "STALL_TIMEOUT": "1.5",
            "CACHE_DIR": "/x",
            "DTYPE": "bfloat16",
        }
    )
    assert (settings.port, settings.trust_remote_code, settings.stall_timeout) == (80, True, 1.5)
    assert (settings.cache_dir, settings.dtype) == (Path("/x"), "bfloat16")


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("PORT", "http"),
        ("PORT", "70000"),
        ("DTYPE", "fp16"),
        ("QUANTIZATION", "2bit"),
        ("MAX_BATCH_SIZE", "0"),
        ("TRUST_REMOTE_CODE", "maybe"),
        ("UNKNOWN_FIELDS", "warn"),
        ("DEVICE_MAP", '{"model": 1.5}'),
        ("DEVICE_MAP", '{"model": "disk"}'),
        ("DEVICE_MAP", '{"": "cpu", "model": "cuda:0"}'),
        ("DEVICE_MAP", "{"),
    ],
)
def test_a_wrong_value_is_named(variable: str, value: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(f"{variable}='{value}'")):
        load_settings({variable: value})


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("auto", "auto"),
        ("1", "cuda:1"),
        ('{"model": 0, "lm_head": "cpu"}', {"model": "cuda:0", "lm_head": "cpu"}),
    ],
)
def test_layers_are_placed_by_a_word_a_device_or_a_map(text: str, places: object) -> None:
    assert parse_device_map(load_settings({"DEVICE_MAP": text}).device_map) == places


def test_a_misspelt_variable_is_noticed() -> None:
    assert near_misses({"MODEL_NAMES": "x", "HOME": "/", "PORT": "1"}) == [("MODEL_NAMES", "MODEL_NAME")]


def test_the_table_has_every_setting() -> None:
    table = settings_table()
    assert all(f"`{name.upper()}`" in table for name in Settings.__struct_fields__)
