"""Runs all checks with the settings as they are: ``python -m ops.doctor``.

``ops/serve.sh --check`` and ``just doctor`` run it behind the choice of GPUs. It starts with the standard
library alone, and old versions of Python can read it, so that it works in a broken installation.
"""

import argparse
import os
import sys
from typing import Iterator, List, Mapping, Optional

from ops.doctor import machine, settings
from ops.doctor.line import FAIL, SET_UP, Check, Line, Unchecked

CHECKS: List[Check] = [
    machine.check_python,
    machine.check_timeout,
    machine.check_packages,
    machine.check_torch,
    machine.check_gpus,
    settings.check_settings,
    settings.check_model,
    settings.check_memory,
    settings.check_quantization,
    settings.check_port,
    settings.check_folders,
    settings.check_access,
]


def main(argv: Optional[List[str]] = None) -> int:
    """Print a line for each finding; return 1 if one fails."""
    parser = argparse.ArgumentParser(
        prog="python -m ops.doctor",
        description="Check what serving needs. Settings are variables, as for serving.",
    )
    parser.parse_args(argv)
    has_failed = False
    for line in report(os.environ):
        print("%-5s %-9s %s" % (line.status, line.what, line.found), flush=True)
        if line.remedy:
            print("%15s -> %s" % ("", line.remedy), flush=True)
        has_failed = has_failed or line.status == FAIL
    return 1 if has_failed else 0


def report(environ: Mapping[str, str]) -> Iterator[Line]:
    """Yield all findings; what a broken installation keeps from being checked is named at the end."""
    unchecked: List[str] = []
    reason = ""
    for place, check in enumerate(CHECKS):
        name = check.__name__.replace("check_", "")
        if place and sys.version_info < machine.OLDEST_PYTHON:
            unchecked.append(name)
            reason = "this Python is too old"
            continue
        try:
            for line in check(environ):
                yield line
        except (ImportError, Unchecked) as error:
            unchecked.append(name)
            reason = reason or str(error)
        except Exception as error:
            yield Line(
                FAIL, name, "%s: %s" % (type(error).__name__, error), "repair the installation: " + SET_UP
            )
    if unchecked:
        yield Line(
            FAIL, "rest", "%s: cannot check %s" % (reason, ", ".join(unchecked)), "begin with the above"
        )


if __name__ == "__main__":
    sys.exit(main())
