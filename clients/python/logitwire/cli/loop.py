"""``logitwire loop``: a generator and a critic take turns, and each draft is compared with the last one."""

import argparse
import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from logitwire.cli.options import (
    add_logits,
    client_of,
    connection_parser,
    fields_of,
    logits_of,
    messages_of,
    sampling_parser,
)
from logitwire.cli.task import Critic, Generator, Task, filled, read_task
from logitwire.client import Client
from logitwire.iterations import Comparison
from logitwire.results import Generation
from logitwire.tracker import IterationTracker

if TYPE_CHECKING:
    from logitwire.cli import Subparsers

UNITS = {2: "bits", "e": "nats"}
MAX_SHOWN = 60


def add_parser(subparsers: "Subparsers") -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "loop",
        parents=[connection_parser(), sampling_parser()],
        help="run a refinement loop, and watch it converge",
        description="""Have a generator write, a critic comment, and the generator write again, as a YAML file
        says; print how far each draft's distributions are from those of the draft before. The loop ends when
        the mean divergence stays below a threshold. Sampling options go before what the file says.""",
    )
    parser.add_argument("task", help="YAML file; clients/python/examples/task.yaml is one")
    parser.add_argument(
        "-o", "--output", metavar="FOLDER", help="save the run there: Parquet, texts as JSONL, and plots"
    )
    parser.add_argument("--no-plots", action="store_true", help="draw nothing, which needs no matplotlib")
    parser.add_argument("--keep-rows", choices=["last", "all"], default="last", help="whose rows are saved")
    add_logits(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the loop; what there is of it is saved also if it fails."""
    task = read_task(args.task)
    folder = None if args.output is None else _new_folder(args)
    tracker = IterationTracker(
        threshold=task.stop.threshold,
        patience=task.stop.patience,
        pairs=task.compare.pairs,
        base=task.compare.base,
        temperature=task.compare.temperature,
        keep_rows=args.keep_rows,
    )
    try:
        with ExitStack() as stack:
            _run(task, args, tracker, stack)
    finally:
        if folder is not None and tracker.iterations:
            _save(tracker, folder, with_plots=not args.no_plots)
            print(f"saved to {folder}", file=sys.stderr)
    return 0


def _new_folder(args: argparse.Namespace) -> Path:
    """Return the folder of the run, made; what would fail at the end fails now."""
    folder = Path(args.output)
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty; name another folder")
    if not args.no_plots:
        # What is missing shows before anything is computed.
        from logitwire import plots  # noqa: F401, PLC0415 - optional, and slow to import
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(args.task, folder / "task.yaml")
    return folder


class _Speaker:
    """The generator or the critic: a role at a server."""

    def __init__(self, client: Client, role: Generator | Critic, fields: Mapping[str, Any]) -> None:
        self._client = client
        self._role = role
        self._fields = fields

    def say(self, template: str, logits: Any, **values: str) -> Generation:
        """Return the answer to a filled template."""
        messages = messages_of(filled(template, values), self._role.system)
        return self._client.chat(messages, logits=logits, **self._fields)


def _run(task: Task, args: argparse.Namespace, tracker: IterationTracker, stack: ExitStack) -> None:
    client = stack.enter_context(client_of(args))
    own = fields_of(args)
    generator = _Speaker(client, task.generator, {**task.sampling, **task.generator.sampling, **own})
    critic = _critic(task, args, client, own, stack)
    _print_head(tracker)
    draft = generator.say(task.generator.first, logits_of(args), task=task.task)
    _add(tracker, draft, None)
    while len(tracker.iterations) < task.iterations:
        critique = critic.say(task.critic.prompt, None, task=task.task, draft=draft.text)
        draft = generator.say(
            task.generator.prompt,
            logits_of(args),
            task=task.task,
            draft=draft.text,
            critique=critique.text,
        )
        _add(tracker, draft, critique)
        if tracker.converged:
            print(f"\nconverged: {tracker.patience} comparisons in a row are below {tracker.threshold:g}")
            return
    print(f"\nnot converged in {task.iterations} iterations")


def _critic(
    task: Task, args: argparse.Namespace, client: Client, own: Mapping[str, Any], stack: ExitStack
) -> _Speaker:
    role = task.critic
    fields = {**task.sampling, **role.sampling, **own}
    if role.model is not None:
        fields["model"] = role.model
    if role.base_url is not None or role.api_key_env is not None:
        key = args.api_key
        if role.api_key_env is not None and not (key := os.environ.get(role.api_key_env)):
            raise ValueError(f"critic.api_key_env: the variable {role.api_key_env} is not set")
        client = stack.enter_context(
            Client(role.base_url or args.base_url, api_key=key, timeout_s=args.timeout)
        )
    return _Speaker(client, role, fields)


def _add(tracker: IterationTracker, draft: Generation, critique: Generation | None) -> None:
    comparison = tracker.add(
        draft,
        critique=None if critique is None else critique.text,
        finish_reason=draft.finish_reason,
        segments=draft.segments,
    )
    _print_line(len(tracker.iterations), draft, comparison)


def _print_head(tracker: IterationTracker) -> None:
    unit = UNITS[tracker.base]
    print(f"iteration  tokens  comparable  mean JSD ({unit})  text")


def _print_line(number: int, draft: Generation, comparison: Comparison | None) -> None:
    num = "-" if comparison is None else str(len(comparison.jsd))
    mean = "-" if comparison is None or not len(comparison.jsd) else f"{comparison.mean:.6f}"
    text = repr(draft.text)
    shown = text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 1]}…"
    print(f"{number:>9}  {len(draft.token_ids):>6}  {num:>10}  {mean:>15}  {shown}", flush=True)


def _save(tracker: IterationTracker, folder: Path, *, with_plots: bool) -> None:
    """Write the tracker, the texts and the plots."""
    tracker.save(folder / "iterations.parquet")
    with (folder / "texts.jsonl").open("wb") as file:
        for place, iteration in enumerate(tracker.iterations):
            comparison = tracker.comparisons[place - 1] if place else None
            mean = None if comparison is None or not len(comparison.jsd) else comparison.mean
            file.write(
                msgspec.json.encode(
                    {
                        "iteration": place + 1,
                        "critique": iteration.metadata["critique"],
                        "text": iteration.text,
                        "num_tokens": len(iteration.token_ids),
                        "finish_reason": iteration.metadata["finish_reason"],
                        "mean_jsd": mean,
                    }
                )
                + b"\n"
            )
    if with_plots and tracker.comparisons:
        from logitwire import plots  # noqa: PLC0415 - optional, and slow to import

        plots.plot_means(tracker, folder / "means.png")
        plots.plot_iterations(tracker, folder / "iterations.png")
        for number, comparison in enumerate(tracker.comparisons, 2):
            iteration = tracker.iterations[number - 1]
            plots.plot_positions(
                comparison.jsd,
                iteration.tokens,
                folder / f"positions-{number}.png",
                positions=comparison.alignment.b_positions,
                num_same_prefix=comparison.alignment.num_same_prefix,
                segments=iteration.metadata["segments"],
                base=tracker.base,
                title=f"iteration {number} against the one before",
            )
