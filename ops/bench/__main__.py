"""Measures the bars and prints them: ``python -m ops.bench [serve|transport ...]``."""

import argparse
import os
import sys
from pathlib import Path

from ops.bench import serve, transport
from ops.bench.bars import machine, save, table, versions

PARTS = {"serve": serve.run, "transport": transport.run}


def main(argv: list[str] | None = None) -> int:
    """Run the parts asked for; return 0 whether or not the bars hold, since a benchmark is no test."""
    parser = argparse.ArgumentParser(prog="python -m ops.bench", description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="default: all")
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count() or 1, help="of the model, on both sides"
    )
    parser.add_argument("--output", type=Path, default=Path("bench-results.json"))
    options = parser.parse_args(argv)
    bars = [bar for part in options.parts or PARTS for bar in PARTS[part](options.threads)]
    print(f"{machine()}\n{versions()}\nthreads: {options.threads}\n\n{table(bars)}")
    save(bars, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
