"""``logitwire jsd``: how far two saved answers are apart, position by position."""

import argparse
import csv
import sys
from typing import TYPE_CHECKING, Any, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from logitwire.alignment import Alignment, align
from logitwire.errors import LogitwireError
from logitwire.files import RowFile, read_rows
from logitwire.metrics import Base

if TYPE_CHECKING:
    from logitwire.cli import Subparsers

UNITS: dict[Base, str] = {2: "bits", "e": "nats"}


def add_parser(subparsers: "Subparsers") -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "jsd",
        help="compare two saved answers, position by position",
        description="""Print the Jensen-Shannon divergence of two answers with rows: Arrow streams as the
        server sends them, Arrow files, or Parquet. Positions up to and with the first one at which the
        tokens differ follow the same generated tokens ("same prefix"). Behind it, equal tokens are paired
        by a diff ("same token"), and a difference may then come from the text between.""",
    )
    parser.add_argument("a", help="file of the first answer")
    parser.add_argument("b", help="file of the second answer")
    parser.add_argument("--base", choices=["2", "e"], default="2", help="2 gives bits, e nats; default: 2")
    parser.add_argument("--temperature", type=float, default=1.0, help="divides the logits first; default: 1")
    parser.add_argument("--choices", nargs=2, type=int, metavar=("A", "B"), help="where a file has several")
    parser.add_argument(
        "--same-prefix", action="store_true", help="leave out what lies behind the first difference"
    )
    parser.add_argument("--plot", metavar="FILE", help="also draw the curve: .png, .svg or .pdf")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print one JSON object")
    output.add_argument("--csv", action="store_true", help="print comma-separated values")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compare two files, print the result, and draw it if asked to."""
    base: Base = next(each for each in get_args(Base) if str(each) == args.base)
    choices = args.choices or (None, None)
    if args.plot:
        # Optional, and slow to import; what is wrong shows before anything is read.
        from logitwire import plots  # noqa: PLC0415

        plots.check_path(args.plot)
    try:
        a, b = (
            read_rows(path, choice=choice) for path, choice in zip((args.a, args.b), choices, strict=True)
        )
    except LogitwireError as error:
        # To this command a broken file is bad input.
        raise ValueError(str(error)) from error
    for path, each in ((args.a, a), (args.b, b)):
        if each.logits is None:
            raise ValueError(f"{path} has no column logits: ask the server for rows")
    assert a.logits is not None
    assert b.logits is not None
    alignment = align(a.token_ids, b.token_ids)
    if args.same_prefix:
        alignment = alignment.same_prefix()
    divergence = alignment.jsd(a.logits, b.logits, base, temperature=args.temperature)
    if args.json:
        _print_json(alignment, divergence, a, b, base)
    elif args.csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(["a_position", "b_position", "token_a", "token_b", "jsd", "kind"])
        writer.writerows(_lines(alignment, divergence, a, b))
    else:
        _print_table(alignment, divergence, a, b, UNITS[base])
    if args.plot:
        plots.plot_positions(
            divergence,
            b.tokens,
            args.plot,
            positions=alignment.b_positions,
            num_same_prefix=alignment.num_same_prefix,
            segments=b.columns.get("segment"),
            base=base,
        )
        print(f"drawn to {args.plot}", file=sys.stderr)
    return 0


def _lines(
    alignment: Alignment, divergence: NDArray[np.float64], a: RowFile, b: RowFile
) -> list[tuple[int, int, str, str, float, str]]:
    columns = (
        alignment.a_positions.tolist(),
        alignment.b_positions.tolist(),
        divergence.tolist(),
        alignment.kinds,
    )
    return [(i, j, a.tokens[i], b.tokens[j], value, kind) for i, j, value, kind in zip(*columns, strict=True)]


def _means(alignment: Alignment, divergence: NDArray[np.float64]) -> list[tuple[str, int, float | None]]:
    """Return the mean over each kind of position: its name, how many, and the mean, if there are any."""
    num = alignment.num_same_prefix
    parts = [("same prefix", divergence[:num]), ("same token", divergence[num:])]
    return [(kind, len(part), float(part.mean()) if len(part) else None) for kind, part in parts]


def _print_table(
    alignment: Alignment, divergence: NDArray[np.float64], a: RowFile, b: RowFile, unit: str
) -> None:
    lines = _lines(alignment, divergence, a, b)
    widths = [max([7, *(len(repr(line[place])) for line in lines)]) for place in (2, 3)]
    print(f"{'a':>5} {'b':>5}  {'token a':<{widths[0]}}  {'token b':<{widths[1]}}  JSD ({unit})  kind")
    for i, j, one, other, value, kind in lines:
        print(f"{i:>5} {j:>5}  {one!r:<{widths[0]}}  {other!r:<{widths[1]}}  {value:<10.6f}  {kind}")
    print()
    for kind, num, mean in _means(alignment, divergence):
        if mean is not None:
            print(f"mean over {num} positions of the {kind}: {mean:.6f} {unit}")
    if not lines:
        print("no comparable positions: one of the answers is empty")


def _print_json(
    alignment: Alignment, divergence: NDArray[np.float64], a: RowFile, b: RowFile, base: Base
) -> None:
    names = ("a_position", "b_position", "token_a", "token_b", "jsd", "kind")
    positions: list[dict[str, Any]] = [
        dict(zip(names, line, strict=True)) for line in _lines(alignment, divergence, a, b)
    ]
    means = {kind.replace(" ", "_"): mean for kind, _, mean in _means(alignment, divergence)}
    found = {"log_base": base, "positions": positions, "mean_jsd": means}
    print(msgspec.json.format(msgspec.json.encode(found)).decode())
