"""Measures the bars and prints them: ``python -m ops.bench [PART ...]``; ``--help`` names the parts."""

import argparse
import os
import sys
from pathlib import Path

from ops.bench import asking, client, float16, metrics, scoring, serve, transport
from ops.bench.bars import Bar, Options, machine, save, table, versions

PARTS = {
    "equal": serve.equal,
    "asking": asking.run,
    "transport": transport.run,
    "client": client.run,
    "scoring": scoring.run,
    "float16": float16.run,
    "metrics": metrics.run,
    "mixed": serve.mixed,
}


def main(argv: list[str] | None = None) -> int:
    """Run the parts asked for; return 0 whether or not the bars hold, since a benchmark is no test."""
    parser = argparse.ArgumentParser(prog="python -m ops.bench", description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count() or 1, help="of the model, on both sides"
    )
    parser.add_argument("--repeats", type=int, default=5, help="medians are taken over so many")
    parser.add_argument("--output", type=Path, default=Path("bench-results.json"))
    asked = parser.parse_args(argv)
    if unknown := set(asked.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    options = Options(asked.threads, asked.repeats)
    bars: list[Bar] = []
    for part in asked.parts or PARTS:
        bars += PARTS[part](options)
        # After each part, since all of them together take long.
        save(bars, asked.output)
        print(f"{part} is done", file=sys.stderr)
    print(f"{machine()}\n{versions()}\n{options}\n\n{table(bars)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
