"""Checks that what the documents name exists: paths, recipes, settings. ``--fix`` rewrites the tables."""

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
    "OPERATIONS.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "clients/python/README.md",
)

_PATH = re.compile(r"`((?:service|schemas|engine|clients|ops|tests|\.ci)/[\w./-]*)`")
_RECIPE = re.compile(r"(?:\./ops/just|\bjust) ([a-z][a-z-]*)\b")
_DEFINED = re.compile(r"^([a-z][a-z-]*)[^:=\n]*:(?!=)", re.MULTILINE)


def main(argv: list[str] | None = None) -> int:
    """Print every fault; return 1 if there is one."""
    parser = argparse.ArgumentParser(prog="python -m ops.check_docs", description=__doc__)
    parser.add_argument("--fix", action="store_true", help="write the marked tables")
    options = parser.parse_args(argv)
    if options.fix:
        for document in (ROOT / name for name in DOCUMENTS):
            document.write_text(with_tables(document.read_text()))
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
    if with_tables(text) != text:
        faults.append(f"{name}: a table of settings is old; run python -m ops.check_docs --fix")
    return faults


def with_tables(text: str) -> str:
    """Return a document with the current tables between those of their marks that it has.

    Raises:
        ValueError: A table's end is not marked.
    """
    for name, table in (("settings", settings_table), ("launch", launch_table)):
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        if begin in text:
            before, after = text[: text.index(begin)], text[text.index(end) :]
            text = f"{before}{begin}\n\n{table()}\n\n{after}"
    return text


def launch_table() -> str:
    """Return the table of the launch's variables, as ``ops/serve.sh --help`` prints it."""
    lines = (ROOT / "ops" / "serve.sh").read_text().splitlines()
    return "\n".join(line for line in lines if line.startswith("|"))


if __name__ == "__main__":
    sys.exit(main())
