import subprocess
import sys

import pytest

SCRIPT = """
import resource
import numpy as np
from service.tuning import SWITCH_INTERVAL_S, tune_process
import sys

def faults(num):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(num):
        rows = [np.ones(300_000, np.uint8) for _ in range(8)]
        del rows
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

tune_process()
assert abs(sys.getswitchinterval() - SWITCH_INTERVAL_S) < 1e-6
faults(2)
print(faults(50))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other allocators")
def test_memory_of_freed_rows_is_used_again() -> None:
    # In a process of its own, since what it sets cannot be taken back.
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 50
