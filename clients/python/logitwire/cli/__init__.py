"""The command ``logitwire``: parses arguments, runs one subcommand, and says in one line what went wrong.

Each subcommand is a module with ``add_parser(subparsers)``, which sets ``run`` as its parser's default, and
``run(args)``, which returns the exit code. Exit codes: 0 done; 1 the server or the connection failed; 2 bad
arguments or bad input, which a request that the server refuses is too; 130 interrupted; 143 told to end.
"""

import argparse
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from types import FrameType
from typing import NoReturn, TypeAlias

from logitwire.cli import capture, chat, jsd, loop, rows
from logitwire.errors import BadRequestError, LogitwireError

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

COMMANDS = (chat, rows, jsd, loop, capture)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="logitwire",
        description="Complete rows of logits on the command line.",
        epilog="""Exit codes: 0 done; 1 the server or the connection failed; 2 bad arguments, bad input, or a
        request that the server refuses; 130 interrupted.""",
    )
    parser.add_argument("--version", action="version", version=f"logitwire {version('logitwire')}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(subparsers)
    args = parser.parse_args(argv)
    try:
        with _leaving_by_sigterm():
            code: int = args.run(args)
        # What is still buffered must meet a closed pipe here, not at exit.
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as head, has enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (BadRequestError, ImportError, OSError, ValueError) as error:
        return _fail(args.command, error, 2)
    except LogitwireError as error:
        return _fail(args.command, error, 1)
    return code


@contextmanager
def _leaving_by_sigterm() -> Iterator[None]:
    """Let SIGTERM unwind what runs, so that no unfinished file stays behind."""

    def leave(number: int, _: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _fail(command: str, error: Exception, code: int) -> int:
    """Say what went wrong, in one line, and return the exit code."""
    message = " ".join(str(error).split()) or type(error).__name__
    print(f"logitwire {command}: {message}", file=sys.stderr)
    return code
