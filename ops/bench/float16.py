"""What float16 on the wire costs, in the units of what people compute from rows: nats, bits, changed choices.

The rows of one server are received as float32, and rounded here as the server rounds them. So both sides come
from the same forward pass, and nothing but the rounding is measured.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from logitwire import Client, jsd
from ops.bench.bars import Bar, Options
from ops.process import ROOT, ServerProcess

TEXT = ROOT / "clients/python/examples/lighthouse.txt"
TASK = "Write a short story about a lighthouse."
CRITIC = "Good. Write it again, with more of the sea in it, and in the present tense."

Rows = NDArray[np.floating[Any]]


def run(options: Options) -> list[Bar]:
    """Measure on the text of an example, behind two contexts."""
    text = TEXT.read_text(encoding="utf-8")
    ask = {"role": "user", "content": TASK}
    again = [
        ask,
        {"role": "assistant", "content": "Once there was a light."},
        {"role": "user", "content": CRITIC},
    ]
    with tempfile.TemporaryDirectory() as folder:
        server = ServerProcess(Path(folder) / "log", THREADS=str(options.threads))
        try:
            asked = [{"messages": messages, "completion": text} for messages in ([ask], again)]
            one, two = Client(server.url).score(asked, logits="float32")
        finally:
            server.stop()
    assert one.logits is not None
    assert two.logits is not None
    ids = np.asarray(one.token_ids)[one.positions]
    return bars_of(one.logits, two.logits, ids, one.logprobs)


def bars_of(p: Rows, q: Rows, ids: NDArray[np.int64], logprobs: NDArray[np.float32]) -> list[Bar]:
    """Return the costs of rounding to float16.

    Args:
        p: float32 (T, V), raw.
        q: float32 (T, V), the same positions behind another context.
        ids: int (T,), the tokens that the rows predict.
        logprobs: float32 (T,), of ``ids`` under ``p``, as the server gives them.
    """
    p16, q16 = p.astype(np.float16), q.astype(np.float16)
    step = np.abs(p16.astype(np.float32) - p)
    picked = _log_softmax(p16)[np.arange(len(ids)), ids]
    exact = jsd(p, q)
    error = np.abs(jsd(p16, q16) - exact)
    bfloat16 = _as_bfloat16(p)
    inexact = np.mean(bfloat16.astype(np.float16).astype(np.float32) != bfloat16)
    changed = int((p16.argmax(-1) != p.argmax(-1)).sum())
    of = f"{p.shape[0]} rows of {p.shape[1]}"
    return [
        _bar("float16: largest change of a logit", step.max(), 0.02, f"mean {step.mean():.2g}, {of}"),
        _bar(
            "float16: largest error of a logprob from the row, nats",
            np.abs(picked - logprobs).max(),
            0.02,
            f"mean {np.abs(picked - logprobs).mean():.2g}; the `logprob` on the wire has none",
        ),
        _bar("float16: changed argmax", changed, 0.01 * len(ids), f"{changed} of {len(ids)} positions"),
        _bar("float16: JSD of a row and its rounded self, bits", jsd(p, p16).max(), 1e-4, "largest"),
        _bar(
            "float16: error of a JSD of two contexts, bits",
            error.max(),
            5e-3,
            f"mean {error.mean():.2g}, of a JSD of {exact.mean():.3g} on average",
        ),
        _bar(
            "float16: values of bfloat16 rows that it cannot hold",
            inexact,
            1e-3,
            "the rows rounded to bfloat16 first; what is left is smaller than 2^-17",
        ),
    ]


def _bar(name: str, value: float, reach: float, note: str) -> Bar:
    return Bar(name, float(value), reach, True, "", note)


def _log_softmax(rows: Rows) -> NDArray[np.float64]:
    """Return float64 (T, V) log-probabilities."""
    wide = rows.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(-1, keepdims=True))
    return wide


def _as_bfloat16(rows: Rows) -> NDArray[np.float32]:
    """Return float32 rows rounded to bfloat16, to nearest, ties to even; numpy has no such dtype."""
    bits = np.ascontiguousarray(rows, np.float32).view(np.uint32)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    return (rounded & np.uint32(0xFFFF0000)).view(np.float32)
