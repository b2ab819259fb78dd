"""The server as a process of its own, for tests and benchmarks."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

STOP_TIMEOUT_S = 60


class ServerProcess:
    """Runs ``python -m service`` on a free port, with settings as variables.

    Attributes:
        url: Its address.
        said: What it printed up to the curl line.
        log_path: Where its log goes.
        pid: Its process.
    """

    def __init__(self, log_path: Path, module: str = "service", **environ: str) -> None:
        """Start it, or another module that announces itself alike, and wait until it is ready.

        Raises:
            RuntimeError: It ended before it was ready; the message is its log.
        """
        self.log_path = log_path
        self._log = log_path.open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            cwd=ROOT,
            env={**os.environ, "PORT": "0", **environ},
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self.pid = self._process.pid
        self.said = ""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.said += line
            if line.startswith("curl"):
                break
        found = re.search(r"at (http://\S+)", self.said)
        if found is None:
            self.stop()
            raise RuntimeError(log_path.read_text())
        self.url = found[1]

    def send_signal(self, number: int) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End it with a signal; return its exit code."""
        self.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """Wait for its end, which something else brings about; return its exit code."""
        try:
            return self._process.wait(STOP_TIMEOUT_S)
        finally:
            self._process.kill()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._log.close()
