"""The options that several subcommands share: where the server is, and how tokens are chosen."""

import argparse
from typing import Any

import msgspec

from logitwire.client import Client
from logitwire.options import LogitsDtype

SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop")
"""Fields of a request that have an option of their own."""


def connection_parser() -> argparse.ArgumentParser:
    """Return a parent parser that says where the server is."""
    parser = argparse.ArgumentParser(add_help=False)
    group = parser.add_argument_group("server")
    group.add_argument(
        "--base-url", metavar="URL", help="default: LOGITWIRE_BASE_URL, or http://127.0.0.1:8000"
    )
    group.add_argument(
        "--api-key",
        metavar="KEY",
        help="default: LOGITWIRE_API_KEY, which is safer, since others on this machine see the arguments",
    )
    group.add_argument("--model", help="by its name at the server; default: the one it serves")
    group.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS", help="for the next bytes; default: 600"
    )
    return parser


def sampling_parser() -> argparse.ArgumentParser:
    """Return a parent parser for how tokens are chosen; what is left out, the server decides."""
    parser = argparse.ArgumentParser(add_help=False)
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, metavar="N", help="tokens of an answer at most")
    group.add_argument("--temperature", type=float, metavar="T", help="0 takes the likeliest token")
    group.add_argument("--top-p", type=float, metavar="P")
    group.add_argument("--top-k", type=int, metavar="K", help="0 is off")
    group.add_argument("--seed", type=int, metavar="N", help="the same seed draws the same tokens")
    group.add_argument("--stop", action="append", metavar="TEXT", help="ends the answer; may come repeatedly")
    group.add_argument(
        "--set",
        action="append",
        default=[],
        type=_field,
        metavar="NAME=JSON",
        help="any other field of the request, such as min_p=0.1",
    )
    return parser


def add_system(parser: argparse.ArgumentParser) -> None:
    """Add the option for a system message."""
    parser.add_argument("--system", metavar="TEXT", help="system message of the conversation")


def add_logits(parser: argparse.ArgumentParser) -> None:
    """Add the option for the type of the rows."""
    parser.add_argument(
        "--logits",
        choices=["float16", "float32"],
        default="float16",
        help="type of the rows; default: float16",
    )


def logits_of(args: argparse.Namespace) -> LogitsDtype:
    """Return the type of the rows."""
    return "float32" if args.logits == "float32" else "float16"


def client_of(args: argparse.Namespace) -> Client:
    """Return a client of the server that the arguments name.

    Raises:
        ValueError: The address or a number makes no sense.
    """
    return Client(args.base_url, api_key=args.api_key, timeout_s=args.timeout)


def fields_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a request that the arguments ask for."""
    fields = {name: getattr(args, name) for name in (*SAMPLING, "model")}
    fields |= dict(args.set)
    return {name: value for name, value in fields.items() if value is not None}


def messages_of(prompt: str, system: str | None) -> list[dict[str, str]]:
    """Return a conversation of one turn."""
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": prompt}]


def _field(given: str) -> tuple[str, Any]:
    name, is_given, value = given.partition("=")
    try:
        return name, msgspec.json.decode(value)
    except msgspec.DecodeError:
        hint = "" if not is_given or not value.strip() else f"; a text needs quotes: {name}='\"{value}\"'"
        raise argparse.ArgumentTypeError(f"{given!r} is not NAME=JSON{hint}") from None
