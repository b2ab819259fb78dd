"""What is free, and whether a model fits, on machines that are made up."""

from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.errors import LoadError
from engine.estimate import Need
from engine.memory import Room, cgroup_limits, fit, placement_limits

GIB = 2**30


def need_of(gigabytes: float, *, packable: float = 0, dtype: str = "float32", place: str = "") -> Need:
    return Need({place: int(gigabytes * GIB)}, int(packable * GIB), 0, 10**9, dtype)


def test_a_model_that_fits_is_loaded_without_a_word() -> None:
    assert fit(need_of(10, packable=9), Room(20 * GIB), EngineConfig()).warnings == ()
    assert fit(need_of(10, packable=9), Room(20 * GIB), EngineConfig()).pack_weights
    assert fit(need_of(10), Room(1, {"cuda:0": 6 * GIB, "cuda:1": 6 * GIB}), EngineConfig()).warnings == ()


def test_a_model_that_cannot_fit_is_refused_with_numbers_and_remedies() -> None:
    with pytest.raises(LoadError) as caught:
        fit(need_of(10), Room(4 * GIB, {"cuda:0": 5 * GIB}), EngineConfig())
    message = str(caught.value)
    for part in (
        "10.00 GiB",
        "cuda:0 5.00 GiB",
        "host 4.00 GiB",
        "NUM_GPUS",
        "DTYPE=bfloat16",
        "QUANTIZATION",
    ):
        assert part in message


def test_a_remedy_that_is_in_use_is_not_named() -> None:
    with pytest.raises(LoadError) as caught:
        fit(need_of(10, dtype="bfloat16"), Room(4 * GIB), EngineConfig(quantization="4bit"))
    assert "DTYPE" not in str(caught.value)
    assert "QUANTIZATION" not in str(caught.value)


def test_a_packed_copy_that_does_not_fit_is_left_out() -> None:
    how = fit(need_of(10, packable=9), Room(15 * GIB), EngineConfig())
    assert not how.pack_weights
    assert "9.00 GiB beside" in how.warnings[0]


def test_a_model_that_spills_to_the_host_is_loaded_with_a_warning() -> None:
    how = fit(need_of(10), Room(8 * GIB, {"cuda:0": 5 * GIB}), EngineConfig())
    assert "5.00 GiB of the model do not fit the GPUs" in how.warnings[0]


def test_a_quantized_model_does_not_spill() -> None:
    free = Room(8 * GIB, {"cuda:0": 5 * GIB})
    with pytest.raises(LoadError):
        fit(need_of(10), free, EngineConfig(quantization="8bit"))


def test_a_folder_takes_what_no_memory_holds() -> None:
    how = fit(need_of(10), Room(4 * GIB), EngineConfig(offload_dir="somewhere"))
    assert "6.00 GiB of the model do not fit the memory" in how.warnings[0]


def test_each_place_of_a_forced_map_must_hold_its_share() -> None:
    free = Room(20 * GIB, {"cuda:0": 5 * GIB})
    assert fit(need_of(10, place="cpu"), free, EngineConfig(device_map="cpu")).warnings == ()
    with pytest.raises(LoadError, match="cannot fit on cuda:0"):
        fit(need_of(10, place="cuda:0"), free, EngineConfig(device_map="cuda:0"))
    with pytest.raises(LoadError, match="there is no cuda:1; torch sees cuda:0"):
        fit(need_of(1, place="cuda:1"), free, EngineConfig(device_map="1"))


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_the_limit_of_any_group_above_counts_and_cached_files_do_not(tmp_path: Path) -> None:
    (tmp_path / "membership").write_text("0::/slurm/job_7/step\n")
    root = tmp_path / "groups"
    write(root / "slurm/job_7/step", memory__max="max\n", memory__current="1\n", memory__stat="")
    stat = "anon 500\ninactive_file 150\nactive_file 50\n"
    write(root / "slurm/job_7", memory__max="1000\n", memory__current="700\n", memory__stat=stat)
    write(root / "slurm", memory__max="9000\n", memory__current="700\n", memory__stat=stat)
    assert list(cgroup_limits(tmp_path / "membership", root)) == [500, 8500]


def test_the_first_version_of_control_groups_is_read_too(tmp_path: Path) -> None:
    (tmp_path / "membership").write_text("5:cpuset:/\n4:memory:/job\n0::/\n")
    stat = "inactive_file 1\nactive_file 1\ntotal_inactive_file 100\ntotal_active_file 0\n"
    write(
        tmp_path / "groups/memory/job",
        memory__limit_in_bytes="1000",
        memory__usage_in_bytes="400",
        memory__stat=stat,
    )
    assert list(cgroup_limits(tmp_path / "membership", tmp_path / "groups")) == [700]


def test_a_machine_without_control_groups_has_no_limit(tmp_path: Path) -> None:
    assert list(cgroup_limits(tmp_path / "none", tmp_path)) == []


def test_accelerate_is_told_of_a_limit_that_it_would_not_see() -> None:
    assert placement_limits(Room(100, {"cuda:0": 200})) is None
    assert placement_limits(Room(100, is_limited=True)) == {"cpu": 90}
    assert placement_limits(Room(100, {"cuda:0": 200}, is_limited=True)) == {0: 180, "cpu": 90}
