"""A server under three times the load that it holds, by clients of all manners, for some minutes.

Clients leave at random, stall, abort, and send what is too large or malformed. Each answer is judged against
the contract; memory, ``/health`` and the engine must be afterwards as they were before.
"""

import http.client
import math
import random
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from urllib.parse import urlsplit

from ops.bench.bars import Bar, Options
from ops.bench.manners import KINDS, Manner, fill, settings_for
from ops.process import ServerProcess

MAX_BATCH_SIZE = 4
MAX_QUEUE = 8
NUM_CLIENTS = 3 * (MAX_BATCH_SIZE + MAX_QUEUE)

ROUNDS = 4
"""Between them the server rests. Memory after the first half is the level to which it must return: by then
the allocator keeps what the largest rows take."""

PAUSE_S = 1.0
"""For which a client that was refused stays away, as it was told."""

SETTLE_S = 60.0
HEALTH_EVERY_S = 0.1

MAX_LEFT_MIB = 128.0
"""The allocator may keep one pass of rows (64 MiB) more or less; a leak of each request would be more."""


@dataclass
class Findings:
    """What came of all requests.

    Attributes:
        outcomes: How often each kind of request ended in which way.
        violations: What the contract does not allow.
        health_ms: How long ``/health`` took, sampled all the time.
        peak_mib: The most memory that the server had.
        memory_mib: What it had after each round, at rest.
    """

    outcomes: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    violations: list[str] = field(default_factory=list)
    health_ms: list[float] = field(default_factory=list)
    peak_mib: float = 0.0
    memory_mib: list[float] = field(default_factory=list)

    def table(self) -> str:
        """Return kinds and outcomes as a Markdown table."""
        lines = ["| requests | outcomes |", "|---|---|"]
        for kind, counts in sorted(self.outcomes.items()):
            shown = ", ".join(f"{outcome} {number}" for outcome, number in counts.most_common())
            lines.append(f"| {kind}: {counts.total()} | {shown} |")
        return "\n".join(lines)


def run(options: Options) -> list[Bar]:
    """Soak a server of its own, print what came of each kind of request, and return the bars."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        server = ServerProcess(
            log,
            MODEL_NAME=options.model,
            THREADS=str(options.threads),
            MAX_BATCH_SIZE=str(MAX_BATCH_SIZE),
            MAX_QUEUE=str(MAX_QUEUE),
            LOG_LEVEL="warning",
            **settings_for(),
        )
        try:
            findings = Findings()
            _fill_cache(server.url)
            for number in range(ROUNDS):
                seconds = options.minutes * 60 / ROUNDS
                _load(server, findings, seconds, math.ceil(options.requests / ROUNDS), seed=number)
                findings.memory_mib.append(_settled(server))
                findings.violations += _left_behind(server)
                print(f"round {number + 1} of {ROUNDS} is over", file=sys.stderr)
        finally:
            code = server.stop()
        findings.violations += [] if code == 0 else [f"exit code {code}"]
        findings.violations += [line for line in log.read_text().splitlines() if '"level": "error"' in line]
    print(findings.table())
    for violation in findings.violations:
        print(f"VIOLATION {violation}")
    return _bars(findings)


def _fill_cache(url: str) -> None:
    """Touch all of the KV cache, which grows with the longest sequence of each place, and stays."""
    with ThreadPoolExecutor(MAX_BATCH_SIZE) as pool:
        places = [pool.submit(fill, url, random.Random(place)) for place in range(MAX_BATCH_SIZE)]  # noqa: S311
        assert {each.result() for each in places} == {"whole"}


def _bars(findings: Findings) -> list[Bar]:
    total = sum(counts.total() for counts in findings.outcomes.values())
    *_, p99 = statistics.quantiles(findings.health_ms, n=100)
    left_mib = findings.memory_mib[-1] - max(findings.memory_mib[: ROUNDS // 2])
    after = ", ".join(f"{each:.0f}" for each in findings.memory_mib)
    memory = f"after each round {after} MiB, at most {findings.peak_mib:.0f}"
    samples = f"99 % under {p99:.0f} ms, {len(findings.health_ms)} samples"
    return [
        Bar(VIOLATIONS, len(findings.violations), 0, True, "", f"{total} requests, {NUM_CLIENTS} clients"),
        Bar("soak: /health, median", statistics.median(findings.health_ms), 50, True, " ms", samples),
        Bar("soak: memory left behind", left_mib, MAX_LEFT_MIB, True, " MiB", memory),
    ]


VIOLATIONS = "soak: violations of the contract"


def _load(server: ServerProcess, findings: Findings, seconds: float, max_requests: int, *, seed: int) -> None:
    """Have all clients ask until the time or the number of requests is over."""
    deadline = time.monotonic() + seconds
    numbers = count()
    lock = threading.Lock()

    def client() -> None:
        while time.monotonic() < deadline:
            with lock:
                number = next(numbers)
            if max_requests and number >= max_requests:
                return
            chance = random.Random(f"{seed}/{number}")  # noqa: S311 - a load, no secret
            manner = chance.choices(KINDS, [each.weight for each in KINDS])[0]
            outcome, violation = _judged(manner, server.url, chance)
            with lock:
                findings.outcomes[manner.kind][outcome] += 1
                if violation:
                    findings.violations.append(f"request {seed}/{number}, {manner.kind}: {violation}")
            if outcome == "refused queue_full":
                time.sleep(PAUSE_S)

    with _watched(server, findings), ThreadPoolExecutor(NUM_CLIENTS) as pool:
        for done in [pool.submit(client) for _ in range(NUM_CLIENTS)]:
            done.result()


def _judged(manner: Manner, url: str, chance: random.Random) -> tuple[str, str | None]:
    """Return how a request ended, and what the contract has against it."""
    try:
        outcome = manner.behave(url, chance)
    except Exception as error:
        return "violation", repr(error)
    return outcome, None if outcome in manner.allowed else f"ended in {outcome}"


@contextmanager
def _watched(server: ServerProcess, findings: Findings) -> Iterator[None]:
    """Sample the server's health and memory meanwhile."""
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(HEALTH_EVERY_S):
            connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=30)
            began = time.perf_counter()
            try:
                connection.request("GET", "/health")
                status = connection.getresponse().status
            except OSError as error:
                findings.violations.append(f"/health: {error!r}")
                continue
            finally:
                connection.close()
            findings.health_ms.append((time.perf_counter() - began) * 1e3)
            findings.peak_mib = max(findings.peak_mib, _memory_mib(server.pid))
            if status != 200:
                findings.violations.append(f"/health: {status}")

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield
    finally:
        is_over.set()
        watching.join()


def _memory_mib(pid: int) -> float:
    """Return the resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return float(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))) / 1024


def _settled(server: ServerProcess) -> float:
    """Wait until nothing is left to do; return the memory then."""
    _until(lambda: not _left_behind(server))
    return _memory_mib(server.pid)


def _left_behind(server: ServerProcess) -> list[str]:
    """Return which of the server's gauges are not at zero."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as response:  # noqa: S310 - our own server
        lines = response.read().decode().splitlines()
    gauges = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    return [line for line in lines if line.startswith(gauges) and float(line.rpartition(" ")[2]) != 0]


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SETTLE_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
