"""What it costs the Python client to receive rows, against reads of the same bytes that look at nothing."""

import asyncio
import socket
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from logitwire import AsyncClient, Client
from logitwire.arrow import MEDIA_TYPE
from ops.bench.bars import Bar, Options, interleaved, seconds
from ops.bench.client_server import NUM_ROWS, recorded_answer
from ops.bench.transport_server import ROW_BYTES, VOCAB_SIZE
from ops.process import ServerProcess

MESSAGES = [{"role": "user", "content": "hi"}]

GIGABYTES = NUM_ROWS * ROW_BYTES / 1e9


def run(options: Options) -> list[Bar]:
    """Measure the synchronous and the asynchronous client, with whole answers and with streams of rows."""
    num_bytes = len(recorded_answer(NUM_ROWS))
    with tempfile.TemporaryDirectory() as folder:
        server = ServerProcess(Path(folder) / "log", "ops.bench.client_server")
        try:
            raw_s, *ours_s = interleaved(
                [
                    lambda: _raw(server.url, num_bytes),
                    lambda: _whole(server.url),
                    lambda: _stream(server.url),
                    lambda: asyncio.run(_whole_async(server.url)),
                    lambda: asyncio.run(_stream_async(server.url)),
                ],
                options.repeats,
            )
        finally:
            server.stop()
    names = ("sync, whole answer", "sync, row by row", "async, whole answer", "async, row by row")
    return [
        Bar(f"client, {name}, against raw reads", raw_s / own_s, 0.7, False, "x", _note(own_s, raw_s))
        for name, own_s in zip(names, ours_s, strict=True)
    ]


def _note(own_s: float, raw_s: float) -> str:
    rates = f"{GIGABYTES / own_s:.2f} GB/s, raw {GIGABYTES / raw_s:.2f}"
    return f"V = {VOCAB_SIZE:,}, float16: {rates}; {(own_s - raw_s) / NUM_ROWS * 1e6:.0f} us a row more"


def _raw(url: str, num_bytes: int) -> float:
    """Receive everything into an array that is made for it, as the client's is, and parse nothing."""
    where = urlsplit(url)
    with socket.create_connection((where.hostname, where.port or 80)) as connection:
        request = f"POST / HTTP/1.1\r\naccept: {MEDIA_TYPE}\r\ncontent-length: 0\r\n\r\n".encode()

        def call() -> None:
            connection.sendall(request)
            left = np.empty(num_bytes, np.uint8).data
            while left:
                left = left[connection.recv_into(left) :]

        return seconds(call)


def _whole(url: str) -> float:
    with Client(url) as client:

        def call() -> None:
            answer = client.chat(MESSAGES, max_tokens=NUM_ROWS)
            assert answer.logits is not None
            assert answer.logits.shape == (NUM_ROWS, VOCAB_SIZE)

        return seconds(call)


def _stream(url: str) -> float:
    with Client(url) as client:

        def call() -> None:
            num = sum(row.logits is not None for row in client.chat_rows(MESSAGES, max_tokens=NUM_ROWS))
            assert num == NUM_ROWS

        return seconds(call)


async def _whole_async(url: str) -> float:
    async with AsyncClient(url) as client:
        began = time.perf_counter()
        answer = await client.chat(MESSAGES, max_tokens=NUM_ROWS)
        took_s = time.perf_counter() - began
        assert answer.logits is not None
        assert answer.logits.shape == (NUM_ROWS, VOCAB_SIZE)
    return took_s


async def _stream_async(url: str) -> float:
    num = 0
    async with AsyncClient(url) as client:
        began = time.perf_counter()
        async for row in client.chat_rows(MESSAGES, max_tokens=NUM_ROWS):
            num += row.logits is not None
        took_s = time.perf_counter() - began
    assert num == NUM_ROWS
    return took_s
