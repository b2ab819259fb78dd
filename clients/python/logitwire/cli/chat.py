"""``logitwire chat``: a conversation, or one answer, with the text as it comes."""

import argparse
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from logitwire.cli.options import add_system, client_of, connection_parser, fields_of, sampling_parser
from logitwire.cli.visible import VisibleText, harmless
from logitwire.client import Client
from logitwire.errors import LogitwireError
from logitwire.metrics import perplexity
from logitwire.results import Generation

if TYPE_CHECKING:
    from logitwire.cli import Subparsers

HINT = "/reset forgets the conversation, /quit or Ctrl-D leaves, Ctrl-C stops an answer."
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


def add_parser(subparsers: "Subparsers") -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "chat",
        parents=[connection_parser(), sampling_parser()],
        help="talk to the model",
        description=f"""Hold a conversation. With a prompt, or where the input is no terminal, there is one
        answer. In a conversation {HINT} Reasoning is shown on a terminal only.""",
    )
    parser.add_argument("prompt", nargs="?", help="ask this and end; - reads it from the input")
    add_system(parser)
    parser.add_argument(
        "--logprobs", action="store_true", help="say after each answer how sure the model was of its tokens"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Hold a conversation, or give one answer."""
    fields = fields_of(args)
    if args.logprobs:
        fields["token_stats"] = True
    with client_of(args) as client:
        conversation = _Conversation(client, args.system, fields)
        if args.prompt not in (None, "-"):
            conversation.ask(args.prompt)
        elif args.prompt == "-" or not sys.stdin.isatty():
            if not (said := sys.stdin.read().strip()):
                raise ValueError("there is nothing to say: the input is empty")
            conversation.ask(said)
        else:
            _talk(conversation)
    return 0


def _talk(conversation: "_Conversation") -> None:
    """Read turns from the terminal until somebody leaves."""
    with suppress(ImportError):
        import readline  # noqa: F401, PLC0415 - makes input() edit lines and remember them
    print(HINT, file=sys.stderr)
    while True:
        try:
            said = input("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print(f"\n{HINT}", file=sys.stderr)
            continue
        if said == "/quit":
            return
        if said == "/reset":
            conversation.reset()
            print("forgotten", file=sys.stderr)
        elif said.startswith("/"):
            print(f"unknown command {said.split()[0]}. {HINT}", file=sys.stderr)
        elif said:
            try:
                conversation.ask(said)
            except KeyboardInterrupt:
                print("\nstopped", file=sys.stderr)
            except LogitwireError as error:
                print(f"\nlogitwire chat: {error}", file=sys.stderr)


class _Conversation:
    """What was said so far, and a server that goes on."""

    def __init__(self, client: Client, system: str | None, fields: Mapping[str, Any]) -> None:
        self._client = client
        self._first = [] if system is None else [{"role": "system", "content": system}]
        self._fields = fields
        self._is_shown_reasoning = sys.stdout.isatty()
        self._messages: list[Mapping[str, Any]] = []
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message."""
        self._messages = [*self._first]

    def ask(self, said: str) -> None:
        """Say something, and print the answer as it comes.

        An answer that is interrupted stays in the conversation as far as it was shown. One that fails leaves
        no trace, nor does the question.
        """
        question = {"role": "user", "content": said}
        stops = self._fields.get("stop") or []
        content, reasoning = VisibleText([stops] if isinstance(stops, str) else stops), VisibleText([])
        try:
            result = self._stream([*self._messages, question], content, reasoning)
        except KeyboardInterrupt:
            self._messages += [question, {"role": "assistant", "content": content.shown}]
            raise
        answer: dict[str, Any] = {"role": "assistant", "content": result.text}
        if result.tool_calls:
            answer["tool_calls"] = result.tool_calls
        self._messages += [question, answer]
        print(harmless(content.rest(result.text), sys.stdout), flush=True)
        for call in result.tool_calls:
            print(msgspec.json.encode(call["function"]).decode())
        if "entropy" in result.columns and result.token_ids:
            print(_certainty(result), file=sys.stderr)

    def _stream(
        self, messages: list[Mapping[str, Any]], content: VisibleText, reasoning: VisibleText
    ) -> Generation:
        is_dim = False
        try:
            with self._client.chat_rows(messages, logits=None, **self._fields) as rows:
                for row in rows:
                    if row.choice:
                        continue
                    if row.segment == "content":
                        _write("\n\n" + PLAIN if is_dim else "", content.add(row))
                        is_dim = False
                    elif row.segment == "reasoning" and self._is_shown_reasoning:
                        _write("" if is_dim else DIM, reasoning.add(row))
                        is_dim = True
                return rows.result
        finally:
            if is_dim:
                _write(PLAIN, "")


def _write(style: str, text: str) -> None:
    sys.stdout.write(style + harmless(text, sys.stdout))
    sys.stdout.flush()


def _certainty(result: Generation) -> str:
    """Return how sure the model was of the tokens of an answer, in one line."""
    num = len(result.token_ids)
    entropy = sum(result.columns["entropy"]) / num
    return (
        f"{num} tokens, mean logprob {result.logprobs.mean():.3f} "
        f"(perplexity {perplexity(result.logprobs):.3f}), mean entropy {entropy:.3f} nats"
    )
