"""What the interpreter and the allocator are told about a server's life."""

import ctypes
import gc
import sys

SWITCH_INTERVAL_S = 0.0005
"""The worker and the event loop take turns, and Python's 5 ms are longer than most of what either does."""

# Parameters of glibc's mallopt, from its <malloc.h>.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3

KEPT_BYTES = 64 * 2**20
MAPPED_BYTES = 32 * 2**20  # the most that glibc takes


def tune_process() -> None:
    """Let threads change often, and let freed rows be used again.

    By itself glibc gives the memory of a freed row back to the system, and each new row then costs a fault
    per page: a fifth of a step that runs no model. Other allocators are left alone.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def spare_what_stays() -> None:
    """Keep the garbage collector from looking again and again at what a server has for good.

    That is the million objects of torch, Transformers and the model. To read a body of 250,000 lists took six
    times as long with them, and nothing else ran meanwhile.
    """
    gc.freeze()
