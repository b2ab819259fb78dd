"""Replays one recorded Arrow answer to every request: ``python -m ops.bench.client_server``.

A plain socket and a thread per connection, so that it costs the same whoever reads.
"""

import re
import socket
import threading

from ops.bench.recorded import recorded_pieces
from schemas.arrow import MEDIA_TYPE

NUM_ROWS = 256

_LENGTH = re.compile(rb"content-length: *([0-9]+)", re.IGNORECASE)


def recorded_answer(num_rows: int) -> bytes:
    """Return head and body, with a chunk per piece as uvicorn writes them."""
    head = f"HTTP/1.1 200 OK\r\ncontent-type: {MEDIA_TYPE}\r\ntransfer-encoding: chunked\r\n\r\n"
    chunks = [b"%x\r\n" % len(piece) + bytes(piece) + b"\r\n" for piece in recorded_pieces(num_rows)]
    return b"".join([head.encode(), *chunks, b"0\r\n\r\n"])


def _serve(connection: socket.socket, answer: bytes) -> None:
    """Answer one request after another, until the client leaves."""
    with connection:
        received = b""
        while piece := connection.recv(2**16):
            received += piece
            head, mark, body = received.partition(b"\r\n\r\n")
            length = _LENGTH.search(head)
            if mark and len(body) == int(length[1] if length else 0):
                received = b""
                try:
                    connection.sendall(answer)
                except ConnectionError:
                    return


def main() -> None:
    """Serve until the process is ended."""
    answer = recorded_answer(NUM_ROWS)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(f"replaying at http://127.0.0.1:{listener.getsockname()[1]}\ncurl", flush=True)
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_serve, args=(connection, answer), daemon=True).start()


if __name__ == "__main__":
    main()
