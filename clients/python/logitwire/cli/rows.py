"""``logitwire rows``: one answer with all its rows, saved to a file while they come."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from logitwire.cli.options import (
    add_logits,
    add_system,
    client_of,
    connection_parser,
    fields_of,
    logits_of,
    messages_of,
    sampling_parser,
)
from logitwire.cli.visible import harmless
from logitwire.client import Client, RowStream
from logitwire.results import Generation
from logitwire.writing import BLOCK_BYTES, FORMATS, Block, Format, TableFile, format_of

if TYPE_CHECKING:
    from logitwire.cli import Subparsers


def add_parser(subparsers: "Subparsers") -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "rows",
        parents=[connection_parser(), sampling_parser()],
        help="save one answer with all its rows of logits",
        description="""Print an answer, and save one row per token: the wire's columns, with the complete
        logits. The file gets its name when it is whole; an answer that breaks off leaves none. It is read by
        logitwire.read_rows, and compared by logitwire jsd.""",
    )
    parser.add_argument("prompt", help="what to say; - reads it from the input")
    parser.add_argument(
        "-o", "--output", required=True, metavar="FILE", help=f"its suffix says how: {', '.join(FORMATS)}"
    )
    parser.add_argument(
        "--raw", action="store_true", help="continue the prompt as it is, without a chat template"
    )
    add_system(parser)
    add_logits(parser)
    parser.add_argument(
        "--prompt-rows", action="store_true", help="also save the rows that predict the prompt's tokens"
    )
    parser.add_argument(
        "--token-stats", action="store_true", help="also save entropy, logsumexp, rank and margin"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Save an answer, and print its text."""
    kind = format_of(args.output)
    if args.raw and args.system is not None:
        raise ValueError("--system belongs to a conversation; --raw has none")
    if not Path(args.output).absolute().parent.is_dir():
        raise ValueError(f"{args.output}: there is no such folder")
    prompt = args.prompt
    if prompt == "-":
        prompt = sys.stdin.read() if args.raw else sys.stdin.read().strip()
    with client_of(args) as client, _ask(client, args, prompt) as rows:
        result, num_rows, width = _save(rows, args.output, kind)
    for choice in result.choices:
        print(harmless(choice.text, sys.stdout))
    kind_of_rows = f"rows of {width} logits" if width else "rows without logits"
    print(f"{num_rows} {kind_of_rows} in {args.output}", file=sys.stderr)
    return 0


def _ask(client: Client, args: argparse.Namespace, prompt: str) -> RowStream[Generation]:
    fields = fields_of(args)
    if args.prompt_rows:
        fields["return_prompt_logits"] = True
    if args.token_stats:
        fields["token_stats"] = True
    if args.raw:
        return client.complete_rows(prompt, logits=logits_of(args), **fields)
    return client.chat_rows(messages_of(prompt, args.system), logits=logits_of(args), **fields)


def _save(rows: RowStream[Generation], path: str, kind: Format) -> tuple[Generation, int, int]:
    """Write the rows as they come; return the answer, the number of rows and their width."""
    first = next(rows, None)
    schema: Any = rows.result._received.schema if first is None else rows.schema
    with TableFile(path, schema, kind) as file:
        block = Block(schema)
        with _Progress() as progress:
            while first is not None:
                block.add(first)
                if block.num_bytes >= BLOCK_BYTES:
                    file.write(block.take())
                progress.show(file.num_rows + len(block), file.num_bytes + block.num_bytes)
                first = next(rows, None)
        if len(block):
            file.write(block.take())
        file.finish(rows.result.response)
        width = schema.field("logits").type.list_size if "logits" in schema.names else 0
        return rows.result, file.num_rows, width


class _Progress:
    """One line on a terminal that is written over and over, and gone at the end."""

    def __init__(self) -> None:
        self._is_shown = sys.stderr.isatty()

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def show(self, num_rows: int, num_bytes: int) -> None:
        """Say how much there is."""
        if self._is_shown:
            print(f"\r{num_rows} rows, {num_bytes / 1e6:.1f} MB", end="", file=sys.stderr, flush=True)
