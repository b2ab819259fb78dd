"""``logitwire capture``: the rows of many prompts, in a folder that survives being killed."""

import argparse
import asyncio
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from logitwire.aio import AsyncClient
from logitwire.capture.folder import FAILURES, Folder
from logitwire.capture.prompts import Prompt, read_prompts
from logitwire.capture.reading import check_capture, open_capture
from logitwire.capture.records import Settings
from logitwire.capture.running import Counts, Run
from logitwire.capture.shards import ShardWriter
from logitwire.cli.options import (
    add_logits,
    add_system,
    connection_parser,
    fields_of,
    logits_of,
    sampling_parser,
)
from logitwire.cli.progress import Progress, line
from logitwire.errors import BadRequestError, LogitwireError

if TYPE_CHECKING:
    from logitwire.cli import Subparsers


def add_parser(subparsers: "Subparsers") -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "capture",
        parents=[connection_parser(), sampling_parser()],
        help="save the rows of many prompts, resumably",
        description="""Answer all prompts of a file, and save their rows in a folder. Each line is a JSON
        object with "prompt" (a text), "messages" or "token_ids"; it may have an "id", which is else the
        number of the line, and fields of its request, such as "seed". The same command again goes on where
        the last one ended, however it ended. Python reads the folder by logitwire.open_capture. The exit code
        is 1 if a prompt failed or the server is gone, 130 and 143 after signals.""",
    )
    parser.add_argument("prompts", nargs="?", metavar="FILE", help="the prompts")
    parser.add_argument("-o", "--output", metavar="FOLDER", help="for the rows")
    parser.add_argument("--check", metavar="FOLDER", help="only hold the shards against the manifest")
    parser.add_argument("--format", choices=["arrow", "parquet"], default="arrow", help="default: arrow")
    parser.add_argument("--concurrency", type=int, default=8, metavar="N", help="prompts at once; default: 8")
    parser.add_argument("--shard-mb", type=float, default=256, metavar="MB", help="per file; default: 256")
    parser.add_argument("--retries", type=int, default=5, metavar="N", help="of a request; default: 5")
    parser.add_argument("--retry-failed", action="store_true", help="try prompts again that have failed")
    parser.add_argument(
        "--raw", action="store_true", help="continue texts as they are, without a chat template"
    )
    add_system(parser)
    add_logits(parser)
    parser.add_argument(
        "--prompt-rows", action="store_true", help="also save the rows that predict the prompts' tokens"
    )
    parser.add_argument(
        "--token-stats", action="store_true", help="also save entropy, logsumexp, rank and margin"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run, resume or check a capture."""
    if args.check is not None:
        return _check(args.check)
    if args.prompts is None or args.output is None:
        raise ValueError("it needs a file of prompts, and a folder by -o")
    if args.concurrency < 1 or args.shard_mb <= 0:
        raise ValueError("--concurrency must be 1 at least, and --shard-mb above 0")
    prompts = read_prompts(args.prompts)
    with Folder.open(Path(args.output), _settings(args)) as folder:
        if args.retry_failed:
            folder.forget_failures()
        pending = folder.pending(prompts)
        code = _run(args, folder, pending, len(prompts)) if pending else 0
        num_left = len(folder.pending(prompts))
        _say(folder, len(prompts), num_left)
        return code or (1 if folder.failures else 0)


def _settings(args: argparse.Namespace) -> Settings:
    fields = fields_of(args)
    if args.prompt_rows:
        fields["return_prompt_logits"] = True
    if args.token_stats:
        fields["token_stats"] = True
    return Settings(
        format=args.format, logits=logits_of(args), raw=args.raw, system=args.system, fields=fields
    )


def _run(args: argparse.Namespace, folder: Folder, pending: list[Prompt], num_all: int) -> int:
    """Answer what is pending; return the exit code."""
    counts = Counts()
    num_before = num_all - len(pending)
    writer = ShardWriter(folder, round(args.shard_mb * 1e6))

    try:
        try:
            with Progress(lambda elapsed_s: line(counts, num_before, num_all, elapsed_s)):
                return asyncio.run(_until_signal(args, folder, writer, counts, pending))
        finally:
            # Whatever ends the run, whole answers are kept.
            writer.close()
    except OSError as error:
        print(f"logitwire capture: {folder.path} cannot be written: {error}", file=sys.stderr)
    except LogitwireError as error:
        print(f"logitwire capture: {' '.join(str(error).split())}", file=sys.stderr)
        return 2 if isinstance(error, BadRequestError) else 1
    return 1


async def _until_signal(
    args: argparse.Namespace, folder: Folder, writer: ShardWriter, counts: Counts, pending: list[Prompt]
) -> int:
    """Run until all is done or a signal comes; return the exit code."""
    loop = asyncio.get_running_loop()
    received: list[int] = []

    async def work() -> None:
        async with AsyncClient(
            args.base_url, api_key=args.api_key, timeout_s=args.timeout, max_retries=args.retries
        ) as client:
            await Run(client, folder, writer, counts).capture(pending, args.concurrency)

    working = asyncio.ensure_future(work())

    def stop(number: int) -> None:
        received.append(number)
        working.cancel()
        # Another signal ends the process at once.
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(each)

    for each in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(each, stop, each)
    try:
        await working
    except asyncio.CancelledError:
        if not received:
            raise
        return 128 + received[0]
    return 0


def _say(folder: Folder, num_all: int, num_left: int) -> None:
    num_rows, num_shards = sum(shard.num_rows for shard in folder.shards), len(folder.shards)
    print(
        f"{len(folder.answers())} of {num_all} prompts are answered: "
        f"{num_rows} rows in {num_shards} shard{'s' * (num_shards != 1)} in {folder.path}",
        file=sys.stderr,
    )
    if folder.failures:
        failures = folder.path / FAILURES
        print(
            f"{len(folder.failures)} failed, as {failures} says; --retry-failed tries them again",
            file=sys.stderr,
        )
    if num_left:
        print(f"{num_left} are left; the same command goes on", file=sys.stderr)


def _check(folder: str) -> int:
    faults = check_capture(folder)
    for fault in faults:
        print(fault)
    if faults:
        return 1
    capture = open_capture(folder)
    num_rows = sum(answer.num_rows for answer in capture.answers.values())
    print(f"whole: {len(capture)} answers, {num_rows} rows; {len(capture.failures)} failures")
    return 0
