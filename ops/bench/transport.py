"""What it costs to bring a row from a finished step to a numpy view in another process."""

import http.client
import io
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from engine.config import EngineConfig
from logitwire import Client
from logitwire.arrow import read_table
from ops.bench.bars import Bar, Options, interleaved, seconds
from ops.bench.recorded import recorded_pieces
from ops.bench.transport_server import ROW_BYTES, VOCAB_SIZE
from ops.process import ServerProcess
from schemas.arrow import MEDIA_TYPE

NUM_ROWS = 64
STREAMED_ROWS = 1000
SLOW_READER_S = 20
MESSAGES = [{"role": "user", "content": "hi"}]


def run(options: Options) -> list[Bar]:
    """Measure encoding and decoding of rows, without a socket."""
    encode_s, decode_s = interleaved([_encode, _decoder()], options.repeats)
    bars = _over_http(options)
    per_row_ms = (encode_s + decode_s) / NUM_ROWS * 1000
    encode_ms, decode_ms = encode_s / NUM_ROWS * 1000, decode_s / NUM_ROWS * 1000
    note = f"V = {VOCAB_SIZE:,}, float16: encode {encode_ms:.3f} ms, decode {decode_ms:.3f} ms"
    return [*bars, Bar("row encode + decode", per_row_ms, 0.5, True, " ms", note)]


def _over_http(options: Options) -> list[Bar]:
    """Measure a stream of rows against raw bytes of the same size through the same uvicorn."""
    with tempfile.TemporaryDirectory() as folder:
        server = ServerProcess(Path(folder) / "log", "ops.bench.transport_server")
        try:
            client = Client(server.url)
            ours, theirs = interleaved(
                [lambda: _rows_per_s(client), lambda: _raw_per_s(server.url)], options.repeats
            )
            growth = _memory_growth(server)
        finally:
            server.stop()
    as_objects = 1 / _object_json_s()
    gigabytes = ROW_BYTES / 1e9
    return [
        Bar(
            "transport, rows against raw bytes",
            ours / theirs,
            0.7,
            False,
            "x",
            f"{ours * gigabytes:.2f} GB/s ({ours:.0f} rows/s), raw {theirs * gigabytes:.2f} GB/s",
        ),
        Bar(
            "transport, rows against one JSON object an entry",
            ours / as_objects,
            100,
            False,
            "x",
            f"{as_objects:.2f} rows/s as objects",
        ),
        Bar(
            f"memory, a reader at 1 row/s for {SLOW_READER_S} s",
            growth / 2**20,
            (EngineConfig.outbox_bytes + 32 * 2**20) / 2**20,
            True,
            " MiB",
            "growth of the server's resident memory",
        ),
    ]


def _rows_per_s(client: Client) -> float:
    def call() -> None:
        answer = client.chat(MESSAGES, max_tokens=STREAMED_ROWS, temperature=0, ignore_eos=True)
        assert answer.logits is not None
        assert answer.logits.shape == (STREAMED_ROWS, VOCAB_SIZE)
        _touch(answer.logits)

    return STREAMED_ROWS / seconds(call)


def _raw_per_s(url: str) -> float:
    def call() -> None:
        connection = http.client.HTTPConnection(urlsplit(url).netloc)
        connection.request("GET", f"/raw/{STREAMED_ROWS}")
        response = connection.getresponse()
        received = np.empty((STREAMED_ROWS, VOCAB_SIZE), np.float16)
        left = received.reshape(-1).view(np.uint8).data
        while left:
            left = left[response.readinto(left) :]
        connection.close()
        _touch(received)

    return STREAMED_ROWS / seconds(call)


def _touch(rows: NDArray[np.floating]) -> None:
    """Look at every byte, on both sides alike; a sum of half floats would measure numpy."""
    rows.view(np.uint64).sum()


def _object_json_s() -> float:
    """Return the seconds that one row takes as one object per entry, written and read."""
    row = np.linspace(-20, 0, VOCAB_SIZE).tolist()

    def call() -> None:
        entries = {
            str(token_id): {"logprob": logprob, "rank": token_id, "decoded_token": "x"}
            for token_id, logprob in enumerate(row)
        }
        json.loads(json.dumps(entries))

    call()
    return min(seconds(call) for _ in range(3))


def _memory_growth(server: ServerProcess) -> int:
    """Return by how many bytes a slow reader of 4,096 rows makes the server grow."""

    def resident() -> int:
        status = Path(f"/proc/{server.pid}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) * 1024

    before = resident()
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc)
    body = {"messages": MESSAGES, "max_tokens": 4096, "temperature": 0, "ignore_eos": True}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"accept": MEDIA_TYPE})
    response = connection.getresponse()
    largest = 0
    for _ in range(SLOW_READER_S):
        response.read(ROW_BYTES)
        time.sleep(1)
        largest = max(largest, resident() - before)
    connection.close()
    return largest


def _encode() -> float:
    return seconds(lambda: recorded_pieces(NUM_ROWS))


def _decoder() -> Callable[[], float]:
    body = b"".join(recorded_pieces(NUM_ROWS))

    def decode() -> float:
        source = io.BytesIO(body)

        def readinto(buffer: memoryview) -> int:
            return source.readinto(buffer)

        return seconds(lambda: read_table(readinto, max_rows=NUM_ROWS))

    return decode
