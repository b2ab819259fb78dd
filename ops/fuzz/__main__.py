"""Throws what no client should send at a server: ``python -m ops.fuzz --count 2000 --seed 0``.

First schemathesis, which makes requests from the OpenAPI document and holds every answer against it; then raw
bytes on a socket. The scripted model answers, so that nothing takes long. Exits with 1 if the server failed
within, hung, broke its own document, or was not as before afterwards.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from ops.fuzz.bodies import examples
from ops.fuzz.firing import ViolationError, fire
from ops.fuzz.requests import shot
from ops.process import ServerProcess

CLIENTS = 4

SETTINGS = {"MODEL_NAME": "scripted", "MAX_MODEL_LEN": "512", "LOG_LEVEL": "warning"}
"""A short context, so that whatever asks for endless tokens gets few."""


@dataclass
class Report:
    """What came of all requests: outcomes by kind, and what went wrong, with the number of the request."""

    outcomes: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    violations: list[str] = field(default_factory=list)

    def table(self) -> str:
        """Return the outcomes as a Markdown table."""
        names = sorted({name for counts in self.outcomes.values() for name in counts})
        lines = ["| request | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
        for kind in sorted(self.outcomes):
            counts = self.outcomes[kind]
            lines.append(f"| {kind} | " + " | ".join(str(counts[name] or "") for name in names) + " |")
        total: Counter[str] = sum(self.outcomes.values(), Counter())
        lines.append("| all | " + " | ".join(str(total[name]) for name in names) + " |")
        return "\n".join(lines)


def raw(url: str, count: int, seed: int, first: int = 0) -> Report:
    """Send raw requests to a server, some at once, and see that it is as before afterwards."""
    report = Report()
    bodies = examples(json.loads(_get(f"{url}/schema")))

    def one(index: int) -> tuple[str, list[str], str | None]:
        made = shot(bodies, seed, index)
        try:
            return made.kind, fire(url, made), None
        except ViolationError as error:
            return made.kind, ["violation"], f"--seed {seed} --first {index} --count 1: {made.kind}: {error}"

    with ThreadPoolExecutor(CLIENTS) as pool:
        for kind, outcomes, violation in pool.map(one, range(first, first + count)):
            report.outcomes[kind].update(outcomes)
            report.violations += [] if violation is None else [violation]
    report.violations += _aftermath(url)
    return report


def _aftermath(url: str, within_s: float = 20.0) -> list[str]:
    """Return what is not as before: the server lives, is ready, and holds no request."""
    deadline = time.monotonic() + within_s
    while True:
        ready = json.loads(_get(f"{url}/ready"))
        if ready["running"] == ready["waiting"] == 0:
            return []
        if time.monotonic() > deadline:
            return [f"requests are left behind: {ready}"]
        time.sleep(0.05)


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=20) as response:  # noqa: S310 - our own server
        return bytes(response.read())


def schema(url: str, max_examples: int, *, has_coverage: bool) -> subprocess.CompletedProcess[str]:
    """Run schemathesis on a server, always with the same requests; its exit code is 0 if all holds.

    Args:
        url: Of the server.
        max_examples: Requests per operation, of those drawn at random.
        has_coverage: Also try each limit of each field, some 5,000 requests.
    """
    phases = "examples,coverage,fuzzing" if has_coverage else "examples,fuzzing"
    command = [
        *(str(Path(sys.executable).with_name("schemathesis")), "run", f"{url}/schema", "--no-color"),
        *("--phases", phases, "--max-examples", str(max_examples), "--generation-deterministic"),
        # Rules between fields, such as either prompt or messages, cannot be said there.
        *("--exclude-checks", "positive_data_acceptance", "--continue-on-failure", "--no-shrink"),
        *("--request-timeout", "20", "--suppress-health-check", "all", "--warnings", "off"),
    ]
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def main(argv: list[str] | None = None) -> int:
    """Run both parts; return 1 if anything is wrong."""
    parser = argparse.ArgumentParser(prog="python -m ops.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=2000, help="raw requests")
    parser.add_argument("--seed", type=int, default=0, help="of the raw requests")
    parser.add_argument("--first", type=int, default=0, help="begin at this one, to repeat it")
    parser.add_argument(
        "--examples", type=int, default=30, help="of schemathesis per operation; 0 leaves it out"
    )
    parser.add_argument("--url", help="of a server that runs; else one is started")
    asked = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        server = None if asked.url else ServerProcess(log, **SETTINGS)
        url = asked.url or (server.url if server else "")
        try:
            code = 0
            if asked.examples:
                ran = schema(url, asked.examples, has_coverage=True)
                print(ran.stdout + ran.stderr)
                code = ran.returncode
            report = raw(url, asked.count, asked.seed, asked.first)
        finally:
            code_of_server = server.stop() if server else 0
        if server:
            report.violations += [line for line in log.read_text().splitlines() if '"error"' in line]
    print(report.table())
    for violation in report.violations:
        print(f"VIOLATION {violation}")
    print(f"{len(report.violations)} violations; the server's exit code is {code_of_server}")
    return 1 if code or report.violations or code_of_server else 0


if __name__ == "__main__":
    sys.exit(main())
