"""What the doctor says of machines and settings, some of them made up."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from ops.doctor import machine, settings
from ops.doctor.__main__ import main, report
from ops.doctor.line import FAIL, OK, WARN, Check, Line

ROOT = Path(__file__).resolve().parents[3]


def one(check: Check, **environ: str) -> Line:
    (line,) = check(environ)
    return line


def test_a_machine_that_can_serve_passes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MODEL_NAME", "scripted")
    monkeypatch.setenv("PORT", "0")
    assert main([]) == 0
    said = capsys.readouterr().out
    for what in (
        "Python",
        "timeout",
        "torch",
        "GPUs",
        "settings",
        "model",
        "memory",
        "port",
        "cache",
        "access",
    ):
        assert what in said


def test_what_is_in_order_needs_no_remedy() -> None:
    lines = list(report({"HOST": "0.0.0.0", "PORT": "0", "MODEL_NAME": "scripted"}))
    assert all((line.status == OK) == (line.remedy == "") for line in lines)


def test_a_wrong_setting_fails_and_what_hangs_on_it_is_not_guessed() -> None:
    lines = {line.what: line for line in report({"DTYPE": "fp16"})}
    assert lines["settings"].status == FAIL
    assert lines["settings"].found.startswith("DTYPE='fp16'")
    assert lines["rest"].found == (
        "the settings are wrong: cannot check model, memory, quantization, port, folders, access"
    )


def test_an_interpreter_without_the_packages_is_told_to_install_them(tmp_path: Path) -> None:
    # The standard library alone: no site-packages.
    done = subprocess.run(
        [sys.executable, "-S", "-m", "ops.doctor"],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "fail  packages  missing: accelerate" in done.stdout
    assert "cannot check torch" in done.stdout
    assert "./ops/just setup" in done.stdout
    assert done.stderr == ""


def test_a_port_that_is_taken_fails() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        line = one(settings.check_port, PORT=str(taken.getsockname()[1]))
    assert line.status == FAIL
    assert "PORT" in line.remedy


def test_a_server_that_anybody_can_use_is_warned_of() -> None:
    assert one(settings.check_access).status == OK
    assert one(settings.check_access, HOST="0.0.0.0").status == WARN
    assert one(settings.check_access, HOST="0.0.0.0", API_KEYS="k").status == OK


def test_a_cache_folder_that_cannot_be_made_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    line = one(settings.check_folders, CACHE_DIR=str(tmp_path / "file" / "cache"))
    assert line.status == FAIL
    assert "CACHE_DIR" in line.remedy


def test_a_folder_that_is_no_checkpoint_fails(tmp_path: Path) -> None:
    assert one(settings.check_model, MODEL_NAME=str(tmp_path)).status == FAIL
    LlamaConfig().save_pretrained(tmp_path)
    assert one(settings.check_model, MODEL_NAME=str(tmp_path)).status == OK


def test_a_folder_that_is_not_there_is_no_fault_of_the_installation(tmp_path: Path) -> None:
    line = one(settings.check_model, MODEL_NAME=str(tmp_path / "nothing"))
    assert (line.status, line.remedy) == (FAIL, "correct MODEL_NAME")
    assert one(settings.check_memory, MODEL_NAME=str(tmp_path / "nothing")).status == WARN


def test_a_model_that_cannot_fit_fails_with_the_servers_own_words(tmp_path: Path) -> None:
    LlamaConfig(hidden_size=65536, intermediate_size=262144, num_hidden_layers=90).save_pretrained(tmp_path)
    line = one(settings.check_memory, MODEL_NAME=str(tmp_path), DTYPE="bfloat16", QUANTIZATION="")
    assert line.status == FAIL
    assert "billion parameters in bfloat16" in line.found
    assert "CHECK_MEMORY=false" in line.remedy


def test_the_embedded_model_is_estimated_as_it_is_served() -> None:
    line = one(settings.check_memory)
    assert "0.13 billion parameters in float32" in line.found


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A machine with two GPUs of which torch sees none, until a test says otherwise."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 550.54.15\necho 550.54.15\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    return monkeypatch


def visible(gpus: pytest.MonkeyPatch, *, archs: list[str], free: int = 70) -> None:
    gpus.setattr(torch.cuda, "is_available", lambda: True)
    gpus.setattr(torch.cuda, "device_count", lambda: 1)
    gpus.setattr(torch.cuda, "mem_get_info", lambda place: (free * 2**30, 80 * 2**30))
    gpus.setattr(torch.cuda, "get_device_capability", lambda place: (9, 0))
    gpus.setattr(torch.cuda, "get_device_name", lambda place: "NVIDIA H100")
    gpus.setattr(torch.cuda, "get_arch_list", lambda: archs)


def test_a_driver_that_is_too_old_for_torch_is_named(gpus: pytest.MonkeyPatch) -> None:
    line = one(machine.check_gpus)
    assert (line.status, line.found) == (FAIL, "torch sees none; driver 550.54.15, torch needs CUDA 12.8")


def test_a_torch_for_the_cpu_beside_gpus_is_said(gpus: pytest.MonkeyPatch) -> None:
    gpus.setattr(torch.version, "cuda", None)
    assert one(machine.check_gpus).status == WARN
    assert one(machine.check_gpus, CUDA_VISIBLE_DEVICES="0").status == FAIL
    assert one(machine.check_gpus, CUDA_VISIBLE_DEVICES="").status == OK


def test_a_gpu_that_works_is_listed_with_its_memory(gpus: pytest.MonkeyPatch) -> None:
    visible(gpus, archs=["sm_80", "sm_90"])
    line = one(machine.check_gpus)
    assert (line.status, line.found) == (OK, "cuda:0 NVIDIA H100, 70.0 of 80.0 GiB free")


def test_a_gpu_that_is_in_use_is_warned_of(gpus: pytest.MonkeyPatch) -> None:
    visible(gpus, archs=["sm_90"], free=30)
    assert one(machine.check_gpus).status == WARN


@pytest.mark.parametrize(
    ("archs", "status"),
    [(["sm_100"], FAIL), (["sm_80"], FAIL), (["sm_80", "compute_80"], OK), (["sm_90a"], OK)],
)
def test_a_gpu_without_kernels_in_torch_fails(
    gpus: pytest.MonkeyPatch, archs: list[str], status: str
) -> None:
    visible(gpus, archs=archs)
    assert one(machine.check_gpus).status == status


def test_gpus_that_were_asked_for_and_are_not_there_fail(gpus: pytest.MonkeyPatch) -> None:
    visible(gpus, archs=["sm_90"])
    first, second = machine.check_gpus({"CUDA_VISIBLE_DEVICES": "0,7"})
    assert (first.status, first.found) == (FAIL, "1 of the 2 in CUDA_VISIBLE_DEVICES=0,7")
    assert second.status == OK
