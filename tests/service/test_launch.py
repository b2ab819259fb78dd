"""The launchers as programs: which devices, signals and exit codes come out, and who is told what."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serving import eventually

ROOT = Path(__file__).resolve().parents[2]
SERVE = str(ROOT / "ops" / "serve.sh")
SLURM = str(ROOT / "ops" / "slurm.sbatch")
OURS = re.compile(
    "(NUM_GPUS|GPU_IDS|WALL_TIME|KILL_AFTER|CUDA_.*|SLURM.*|PORT|HOST|THREADS|DRAIN_TIMEOUT|API_KEYS.*|LOGITWIRE_DIR)"
)

SEES = """#!/bin/sh
echo "${CUDA_VISIBLE_DEVICES-unset} ${CUDA_DEVICE_ORDER-unset} ${DRAIN_TIMEOUT-unset}"
exit ${CODE:-0}
"""
DRAINS = """#!/bin/bash
trap 'echo drained; exit 0' TERM
while true; do sleep 0.02; done
"""
STAYS = """#!/bin/bash
trap 'echo stays' TERM
while true; do sleep 0.02; done
"""


def program(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """An environment without settings of ours, on a machine with eight GPUs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program(folder / "nvidia-smi", "#!/bin/sh\nseq 0 7\n")
    kept = {name: value for name, value in os.environ.items() if not OURS.fullmatch(name)}
    return {**kept, "PATH": f"{folder}:{kept['PATH']}", "MODEL_NAME": "scripted", "PYTHON": sys.executable}


def launch(environ: dict[str, str], *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SERVE, *arguments],
        env={**environ, **variables},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.parametrize(
    ("variables", "devices"),
    [
        ({}, "unset unset"),
        ({"NUM_GPUS": "2"}, "0,1 PCI_BUS_ID"),
        ({"NUM_GPUS": "0"}, " PCI_BUS_ID"),
        ({"GPU_IDS": "0,2,5"}, "0,2,5 PCI_BUS_ID"),
        ({"GPU_IDS": "3", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, "3 FASTEST_FIRST"),
        ({"CUDA_VISIBLE_DEVICES": "6,4"}, "6,4 unset"),
        ({"CUDA_VISIBLE_DEVICES": "6,4", "NUM_GPUS": "1"}, "6 PCI_BUS_ID"),
        ({"CUDA_VISIBLE_DEVICES": "6,4", "GPU_IDS": "4"}, "4 PCI_BUS_ID"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-aa,GPU-bb", "NUM_GPUS": "2"}, "GPU-aa,GPU-bb PCI_BUS_ID"),
    ],
)
def test_the_server_sees_the_gpus_that_were_chosen(
    environ: dict[str, str], tmp_path: Path, variables: dict[str, str], devices: str
) -> None:
    done = launch(environ, PYTHON=program(tmp_path / "python", SEES), **variables)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{devices} unset\n", "")


@pytest.mark.parametrize(
    "variables",
    [
        {"NUM_GPUS": "2", "GPU_IDS": "0,1"},
        {"NUM_GPUS": "two"},
        {"NUM_GPUS": "-1"},
        {"NUM_GPUS": "9"},
        {"GPU_IDS": "0;1"},
        {"GPU_IDS": "1,1"},
        {"GPU_IDS": "8"},
        {"NUM_GPUS": "3", "CUDA_VISIBLE_DEVICES": "6,4"},
        {"NUM_GPUS": "1", "CUDA_VISIBLE_DEVICES": ""},
        {"GPU_IDS": "0", "CUDA_VISIBLE_DEVICES": "6,4"},
        {"WALL_TIME": "8 hours"},
        {"WALL_TIME": "-1"},
        {"WALL_TIME": "inf"},
        {"KILL_AFTER": "soon", "WALL_TIME": "1h"},
    ],
)
def test_a_launch_that_makes_no_sense_is_refused_by_name(
    environ: dict[str, str], tmp_path: Path, variables: dict[str, str]
) -> None:
    done = launch(environ, PYTHON=program(tmp_path / "python", SEES), **variables)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    name, value = next(iter(variables.items()))
    assert f"{name}=" in line or f"there is no GPU {int(value) - (name == 'NUM_GPUS')}" in line


def test_arguments_are_refused_and_help_lists_every_setting(environ: dict[str, str]) -> None:
    assert launch(environ, "--num-gpus=2").returncode == 2
    text = launch(environ, "--help").stdout
    for variable in ("NUM_GPUS", "WALL_TIME", "KILL_AFTER", "MODEL_NAME", "DRAIN_TIMEOUT"):
        assert f"| `{variable}` |" in text


def test_a_check_looks_at_what_would_be_served(environ: dict[str, str], tmp_path: Path) -> None:
    python = program(tmp_path / "python", '#!/bin/sh\necho "$CUDA_VISIBLE_DEVICES $*"\n')
    assert (
        launch(environ, "--check", PYTHON=python, NUM_GPUS="2", WALL_TIME="1h").stdout
        == "0,1 -m ops.doctor\n"
    )


def test_a_link_to_the_launcher_serves_the_clone_that_it_leads_to(
    environ: dict[str, str], tmp_path: Path
) -> None:
    link = tmp_path / "a link"
    link.symlink_to(SERVE)
    python = program(tmp_path / "python", '#!/bin/sh\necho "$PYTHONPATH"\n')
    kept = {name: value for name, value in environ.items() if name != "PYTHONPATH"}
    printed = subprocess.check_output([link], env={**kept, "PYTHON": python}, text=True)
    assert printed == f"{ROOT}\n"


def test_the_exit_code_is_the_servers_own(environ: dict[str, str], tmp_path: Path) -> None:
    python = program(tmp_path / "python", SEES)
    assert launch(environ, PYTHON=python, CODE="3").returncode == 3
    assert launch(environ, PYTHON=python, CODE="3", WALL_TIME="1h").returncode == 3


def test_at_the_wall_time_the_server_drains_and_ends_with_0(environ: dict[str, str], tmp_path: Path) -> None:
    done = launch(environ, PYTHON=program(tmp_path / "python", DRAINS), WALL_TIME="2")
    assert (done.returncode, done.stdout) == (0, "drained\n")


def test_a_server_that_does_not_end_is_killed(environ: dict[str, str], tmp_path: Path) -> None:
    done = launch(environ, PYTHON=program(tmp_path / "python", STAYS), WALL_TIME="2s", KILL_AFTER="1")
    assert (done.returncode, done.stdout) == (128 + signal.SIGKILL, "stays\n")


@pytest.mark.parametrize(
    ("variables", "seconds", "is_warned"),
    [
        ({"WALL_TIME": "8h"}, "20", False),
        ({"WALL_TIME": "8h", "KILL_AFTER": "100"}, "90", False),
        ({"WALL_TIME": "8h", "DRAIN_TIMEOUT": "15"}, "15", False),
        ({"WALL_TIME": "8h", "DRAIN_TIMEOUT": "60"}, "60", True),
        ({"WALL_TIME": "0d"}, "unset", False),
    ],
)
def test_a_drain_ends_before_the_kill_or_a_warning_says_that_it_may_not(
    environ: dict[str, str], tmp_path: Path, variables: dict[str, str], seconds: str, is_warned: bool
) -> None:
    done = launch(environ, PYTHON=program(tmp_path / "python", SEES), **variables)
    assert done.stdout == f"unset unset {seconds}\n"
    assert ("DRAIN_TIMEOUT=60" in done.stderr) == is_warned


class Running:
    """A launcher at work, in a process group of its own, with its output in a file."""

    def __init__(self, command: list[str], environ: dict[str, str], log: Path) -> None:
        self._log = log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command, env=environ, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    @property
    def said(self) -> str:
        return self._log.read_text()

    def wait_until_it_serves(self) -> None:
        eventually(lambda: "logitwire serves" in self.said or self.process.poll() is not None, within_s=60)
        assert "logitwire serves" in self.said, self.said

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture
def running(environ: dict[str, str], tmp_path: Path) -> Iterator[Any]:
    launched: list[Running] = []

    def start(command: list[str], **variables: str) -> Running:
        launched.append(Running(command, {**environ, **variables}, tmp_path / "log"))
        return launched[-1]

    yield start
    for each in launched:
        each.end()


def test_an_interrupt_of_the_terminal_drains_a_timed_server_once(running: Any) -> None:
    server = running([SERVE], PORT="0", WALL_TIME="1h", LOG_FORMAT="text")
    server.wait_until_it_serves()
    # A terminal signals the whole group: GNU timeout, which passes it on, and the server itself.
    os.killpg(server.process.pid, signal.SIGINT)
    assert server.process.wait(60) == 0
    assert server.said.count("draining") == 1


def test_a_job_says_where_it_is_and_drains_before_the_limit(running: Any, tmp_path: Path) -> None:
    # SLURM runs a copy of the script from elsewhere.
    copy = program(tmp_path / "slurm_script", Path(SLURM).read_text())
    job = running(
        [copy],
        SLURM_JOB_ID="1234567",
        SLURM_SUBMIT_DIR=str(ROOT),
        SLURMD_NODENAME="gpu07",
        SLURM_JOB_USER="ada",
        SLURM_SUBMIT_HOST="login1",
        CUDA_VISIBLE_DEVICES="2,3",
        SLURM_CPUS_PER_TASK="1",
        LOG_FORMAT="text",
    )
    job.wait_until_it_serves()
    found = re.search(r"^address: +http://gpu07:(\d+)$", job.said, re.MULTILINE)
    assert found is not None
    assert f"ssh -N -L {found[1]}:gpu07:{found[1]} ada@login1\n" in job.said
    assert "GPUs 2,3" in job.said
    assert "set API_KEYS" in job.said
    assert "threads=1" in job.said
    with urllib.request.urlopen(f"http://127.0.0.1:{found[1]}/health") as reply:
        assert reply.status == 200
    # The batch shell alone is signalled.
    os.kill(job.process.pid, signal.SIGTERM)
    assert job.process.wait(60) == 0
    assert job.said.count("draining") == 1


def listen_where_a_job_would() -> socket.socket:
    for port in range(20000, 30000):
        with contextlib.suppress(OSError):
            return socket.create_server(("127.0.0.1", port))
    raise AssertionError("no port is free")


def test_a_job_leaves_a_port_that_is_taken_and_has_the_exit_code_of_its_server(
    running: Any, tmp_path: Path
) -> None:
    with listen_where_a_job_would() as other:
        port = other.getsockname()[1]
        variables = {"SLURM_JOB_ID": str(port - 20000), "API_KEYS": "x", "CODE": "3"}
        job = running(["bash", SLURM], PYTHON=program(tmp_path / "python", SEES), **variables)
        assert job.process.wait(60) == 3
    found = re.search(r"^address: .*:(\d+)$", job.said, re.MULTILINE)
    assert found is not None
    assert int(found[1]) > port
    assert "API_KEYS" not in job.said


def test_a_job_finds_its_clone_by_what_slurm_says_of_it(
    running: Any, environ: dict[str, str], tmp_path: Path
) -> None:
    copy = program(tmp_path / "slurm_script", Path(SLURM).read_text())
    text = f"#!/bin/sh\necho 'JobId='$3\necho '   Command={SLURM}'\necho '   WorkDir=/'\n"
    program(tmp_path / "bin" / "scontrol", text)
    job = running(
        [copy],
        PYTHON=program(tmp_path / "python", SEES),
        SLURM_JOB_ID="7",
        SLURM_SUBMIT_DIR=str(tmp_path),
        HOST="::1",
    )
    assert job.process.wait(60) == 0
    assert job.said.endswith("unset unset 90\n")


def test_a_job_without_a_clone_says_what_to_set(running: Any, tmp_path: Path) -> None:
    copy = program(tmp_path / "slurm_script", Path(SLURM).read_text())
    job = running([copy], SLURM_SUBMIT_DIR=str(tmp_path))
    assert job.process.wait(60) == 2
    assert "LOGITWIRE_DIR" in job.said
