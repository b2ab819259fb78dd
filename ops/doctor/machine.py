"""Checks of the machine and the installation. Each imports what it needs itself, since that may be broken."""

import importlib.util
import subprocess
import sys
from typing import Any, Iterator, Mapping

from ops.doctor.line import FAIL, GIB, OK, SET_UP, WARN, Line

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 9)
PACKAGES = ("accelerate", "litestar", "llguidance", "msgspec", "pyarrow", "torch", "transformers", "uvicorn")


def check_python(environ: Mapping[str, str]) -> Iterator[Line]:
    """Check the interpreter."""
    found = "%s (%s)" % (sys.version.split()[0], sys.executable)
    if sys.version_info >= OLDEST_PYTHON:
        yield Line(OK, "Python", found)
    else:
        yield Line(FAIL, "Python", found, "install %d.%d or newer; then %s" % (*OLDEST_PYTHON, SET_UP))


def check_timeout(environ: Mapping[str, str]) -> Iterator[Line]:
    """Check the program that ends the server at WALL_TIME."""
    command = ["timeout", "--foreground", "--preserve-status", "--kill-after=9", "9", "true"]
    try:
        works = subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0
    except OSError:
        works = False
    if works:
        yield Line(OK, "timeout", "GNU timeout is there, for WALL_TIME")
    else:
        status = FAIL if environ.get("WALL_TIME", "0") != "0" else WARN
        yield Line(status, "timeout", "no GNU timeout, so no WALL_TIME", "install coreutils")


def check_packages(environ: Mapping[str, str]) -> Iterator[Line]:
    """Check that everything is installed."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        yield Line(FAIL, "packages", "missing: " + ", ".join(missing), SET_UP)
    else:
        yield Line(OK, "packages", "all there")


def check_torch(environ: Mapping[str, str]) -> Iterator[Line]:
    """Check torch's version and say for what it was built."""
    import torch

    built = (
        "CUDA %s" % torch.version.cuda if torch.version.cuda else "ROCm" if torch.version.hip else "CPU only"
    )
    found = "%s, built for %s" % (torch.__version__, built)
    if tuple(int(each) for each in torch.__version__.split(".")[:2]) >= OLDEST_TORCH:
        yield Line(OK, "torch", found)
    else:
        yield Line(FAIL, "torch", found, "install %d.%d or newer" % OLDEST_TORCH)


def check_gpus(environ: Mapping[str, str]) -> Iterator[Line]:
    """Check that torch sees the GPUs that are there and asked for."""
    import torch

    visible = environ.get("CUDA_VISIBLE_DEVICES")
    asked = [each for each in (visible or "").split(",") if each]
    listed, driver = _nvidia_smi()
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not seen and visible is not None and not asked:
        yield Line(OK, "GPUs", "hidden by CUDA_VISIBLE_DEVICES; the CPU serves")
        return
    if not seen and not listed and not asked:
        yield Line(OK, "GPUs", "none; the CPU serves")
        return
    if not seen and not torch.version.cuda and not torch.version.hip:
        remedy = "install a build of torch for CUDA into .venv"
        yield Line(FAIL if asked else WARN, "GPUs", "torch is built for the CPU only", remedy)
        return
    if not seen:
        found = "torch sees none; driver %s, torch needs CUDA %s" % (
            driver or "does not answer",
            torch.version.cuda,
        )
        yield Line(FAIL, "GPUs", found, "update the driver, or install a build of torch for an older CUDA")
        return
    if seen < len(asked):
        found = "%d of the %d in CUDA_VISIBLE_DEVICES=%s" % (seen, len(asked), visible)
        yield Line(FAIL, "GPUs", found, "name only GPUs that nvidia-smi lists: NUM_GPUS or GPU_IDS")
    for place in range(seen):
        yield _gpu_line(torch, place)


def _gpu_line(torch: Any, place: int) -> Line:
    free, total = torch.cuda.mem_get_info(place)
    major, minor = torch.cuda.get_device_capability(place)
    name = torch.cuda.get_device_name(place)
    found = "cuda:%d %s, %.1f of %.1f GiB free" % (place, name, free / GIB, total / GIB)
    # Kernels of one major version run on later minor ones; PTX, named compute_XY, on all later ones.
    builds = [each.rsplit("_", 1) for each in torch.cuda.get_arch_list()]
    numbers = [(kind, int("".join(filter(str.isdigit, number)))) for kind, number in builds]
    own = 10 * major + minor
    if torch.version.cuda and not any(
        number <= own and (kind == "compute" or number // 10 == major) for kind, number in numbers
    ):
        return Line(
            FAIL,
            "GPUs",
            "%s; torch has no kernels for sm_%d" % (found, own),
            "install another build of torch",
        )
    if free < total / 2:
        return Line(WARN, "GPUs", found, "others use it: nvidia-smi shows who")
    return Line(OK, "GPUs", found)


def _nvidia_smi() -> "tuple[int, str]":
    """Return how many GPUs the driver lists, and its version."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split(
            "\n"
        )
    except (OSError, subprocess.SubprocessError):
        return 0, ""
    versions = [line.strip() for line in lines if line.strip()]
    return len(versions), versions[0] if versions else ""
