"""The command ``logitwire``: parses arguments, runs one subcommand, and says in one line what went wrong.

Each subcommand is a module with ``add_parser(subparsers)``, which sets ``run`` as its parser's default, and
``run(args)``, which returns the exit code. Exit codes: 0 done; 1 the server or the connection failed; 2 bad
arguments or bad input; 130 interrupted.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from typing import TypeAlias

from logitwire.cli import jsd
from logitwire.errors import LogitwireError

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

COMMANDS = (jsd,)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="logitwire", description="Complete rows of logits on the command line."
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(subparsers)
    args = parser.parse_args(argv)
    try:
        code: int = args.run(args)
        # What is still buffered must meet a closed pipe here, not at exit.
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as head, has enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (OSError, ValueError) as error:
        print(f"logitwire {args.command}: {error}", file=sys.stderr)
        return 2
    except LogitwireError as error:
        print(f"logitwire {args.command}: {error}", file=sys.stderr)
        return 1
    return code
