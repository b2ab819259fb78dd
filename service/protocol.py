"""HTTP/1.1 where uvicorn is loose: offers of other protocols, missing hosts, cut connections."""

import asyncio
import contextlib
import socket
import struct

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

OFFERS = (b"upgrade", b"connection", b"http2-settings")


RESET = struct.pack("ii", 1, 0)
"""For ``SO_LINGER``: closing drops what has not been sent."""


def cut(transport: asyncio.Transport) -> None:
    """Close a connection at once; the kernel would keep for ever what a client does not take."""
    # It may be closed already.
    with contextlib.suppress(OSError):
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    transport.abort()


class SteadyProtocol(HttpToolsProtocol):
    """uvicorn's connection, which answers a request that offers an upgrade as if it offered none.

    Java's client and ``curl --http2`` offer HTTP/2 with each first request. The parser takes such a request
    for the last one and stops before its body, and uvicorn would drop that. So it is read again without the
    offer.
    """

    _is_offer = False

    def data_received(self, data: bytes) -> None:
        """Take what came."""
        self._unset_keepalive_if_required()
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as stop:
                if not self._is_offer:
                    # This was CONNECT, which is answered, and behind which nothing can be read.
                    return
                data = self._head() + data[stop.args[0] :]
                self._is_offer = False
                self.parser = httptools.HttpRequestParser(self)
            except httptools.HttpParserError:
                self.send_400_response("this is no valid HTTP request")
                return
            else:
                return

    def on_headers_complete(self) -> None:
        """Begin the answer, unless the request is going to be read again.

        Raises:
            ValueError: It does not name one host, which RFC 9112, section 3.2, has refused. The parser passes
                it on as an error of the request.
        """
        hosts = [value for name, value in self.headers if name == b"host"]
        if self.parser.get_http_version() == "1.1" and len(hosts) != 1:
            raise ValueError("a request names one host")
        self._is_offer = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        if not self._is_offer:
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        """End a request, unless it is going to be read again."""
        if not self._is_offer:
            super().on_message_complete()

    def _head(self) -> bytes:
        """Return the head of the request without the offer."""
        version = self.parser.get_http_version().encode()
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
        lines += [name + b": " + value for name, value in self.headers if name not in OFFERS]
        if any(name == b"connection" and b"close" in value.lower() for name, value in self.headers):
            lines.append(b"connection: close")
        return b"\r\n".join(lines) + b"\r\n\r\n"
