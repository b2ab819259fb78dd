"""Checks that what the documents name exists: paths, recipes, settings. ``--fix`` rewrites the table."""

import argparse
import re
import sys
from pathlib import Path

from service.settings import settings_table

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = (
    "README.md",
    "API.md",
    "METHOD.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "clients/python/README.md",
)
BEGIN, END = "<!-- settings -->", "<!-- /settings -->"

_PATH = re.compile(r"`((?:service|schemas|engine|clients|ops|tests|\.ci)/[\w./-]*)`")
_RECIPE = re.compile(r"(?:\./ops/just|\bjust) ([a-z][a-z-]*)\b")
_DEFINED = re.compile(r"^([a-z][a-z-]*)[^:=\n]*:(?!=)", re.MULTILINE)


def main(argv: list[str] | None = None) -> int:
    """Print every fault; return 1 if there is one."""
    parser = argparse.ArgumentParser(prog="python -m ops.check_docs", description=__doc__)
    parser.add_argument("--fix", action="store_true", help="write the settings table into the README")
    options = parser.parse_args(argv)
    if options.fix:
        readme = ROOT / "README.md"
        readme.write_text(with_table(readme.read_text()))
    recipes = set(_DEFINED.findall((ROOT / "justfile").read_text()))
    faults = [fault for name in DOCUMENTS for fault in faults_of(name, (ROOT / name).read_text(), recipes)]
    for fault in faults:
        print(fault)
    return 1 if faults else 0


def faults_of(name: str, text: str, recipes: set[str]) -> list[str]:
    """Return what a document names that is not there."""
    faults = [f"{name}: no such path: {path}" for path in _PATH.findall(text) if not (ROOT / path).exists()]
    code = "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL))
    named = set(_RECIPE.findall(code))
    faults += [f"{name}: no such recipe: {recipe}" for recipe in sorted(named - recipes)]
    if BEGIN in text and with_table(text) != text:
        faults.append(f"{name}: the settings table is old; run python -m ops.check_docs --fix")
    return faults


def with_table(text: str) -> str:
    """Return a document with the current settings table between its marks.

    Raises:
        ValueError: One of the marks is missing.
    """
    before, after = text[: text.index(BEGIN)], text[text.index(END) :]
    return f"{before}{BEGIN}\n\n{settings_table()}\n\n{after}"


if __name__ == "__main__":
    sys.exit(main())
