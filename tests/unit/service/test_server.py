"""The listening socket."""

import asyncio
import socket

import pytest

from service.server import listen


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_connections_send_at_once_what_is_written_to_them(host: str) -> None:
    found: asyncio.Queue[int] = asyncio.Queue()

    async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted = writer.get_extra_info("socket")
        found.put_nowait(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()
        await writer.wait_closed()

    try:
        listener = listen(host, 0)
    except OSError:
        pytest.skip("no IPv6 here")
    async with await asyncio.start_server(accept, sock=listener):
        _, writer = await asyncio.open_connection(host, listener.getsockname()[1])
        assert await found.get()
        writer.close()
        await writer.wait_closed()
