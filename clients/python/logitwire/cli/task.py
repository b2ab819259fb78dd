"""The YAML file of ``logitwire loop``: what it may say, and what is wrong with one that says more."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from logitwire.fields import FIELDS, nearest

PLACEHOLDERS = ("task", "draft", "critique")

_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`(?: - at `\$\.?(.*)`)?")
_INVALID = re.compile(r"(.*) - at `\$\.?(.*)`")


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all parts."""


class Generator(_Part, frozen=True, kw_only=True):
    """Who writes.

    Attributes:
        prompt: What it is told in every iteration but the first.
        first: What it is told in the first one, when there is no draft yet.
        system: Its system message.
        sampling: Fields of its requests; they go before those of the task.
    """

    prompt: str
    first: str = "{task}"
    system: str | None = None
    sampling: dict[str, Any] = {}  # noqa: RUF012 - msgspec copies it


class Critic(_Part, frozen=True, kw_only=True):
    """Who comments.

    Attributes:
        prompt: What it is told.
        system: Its system message.
        sampling: Fields of its requests; they go before those of the task.
        base_url: Of another server.
        model: At that server.
        api_key_env: Name of the variable that holds the key of that server, if it is another one.
    """

    prompt: str
    system: str | None = None
    sampling: dict[str, Any] = {}  # noqa: RUF012 - msgspec copies it
    base_url: str | None = None
    model: str | None = None
    api_key_env: str | None = None


class Stop(_Part, frozen=True, kw_only=True):
    """When the loop has converged; see :class:`logitwire.IterationTracker`."""

    threshold: Annotated[float, msgspec.Meta(gt=0)] = 0.01
    patience: Annotated[int, msgspec.Meta(ge=1)] = 2


class Compare(_Part, frozen=True, kw_only=True):
    """How two iterations are compared; see :class:`logitwire.IterationTracker`."""

    pairs: Literal["same prefix", "all"] = "same prefix"
    base: Literal[2, "e"] = 2
    temperature: Annotated[float, msgspec.Meta(gt=0)] = 1.0


class Task(_Part, frozen=True, kw_only=True):
    """A whole loop.

    Attributes:
        task: What is to be written.
        generator: Who writes.
        critic: Who comments.
        iterations: Drafts at most.
        stop: When fewer are enough.
        compare: How two drafts are compared.
        sampling: Fields of all requests.
    """

    task: str
    generator: Generator
    critic: Critic
    iterations: Annotated[int, msgspec.Meta(ge=1)] = 8
    stop: Stop = Stop()
    compare: Compare = Compare()
    sampling: dict[str, Any] = {}  # noqa: RUF012 - msgspec copies it


PARTS: dict[str, type[_Part]] = {
    "": Task,
    "generator": Generator,
    "critic": Critic,
    "stop": Stop,
    "compare": Compare,
}
"""By their key."""


def read_task(path: str | Path) -> Task:
    """Read and check a task.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is no task; the message names the key.
        ImportError: There is no pyyaml.
    """
    text = Path(path).read_bytes()
    try:
        task = msgspec.yaml.decode(text, type=Task)
    except ImportError as error:
        raise ImportError("the task needs pyyaml, which is in the extra cli: pip install pyyaml") from error
    except msgspec.ValidationError as error:
        raise ValueError(f"{path}: {_said(str(error))}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no YAML: {error}") from error
    for key, template, known in (
        ("generator.first", task.generator.first, ("task",)),
        ("generator.prompt", task.generator.prompt, PLACEHOLDERS),
        ("critic.prompt", task.critic.prompt, ("task", "draft")),
    ):
        for name in _PLACEHOLDER.findall(template):
            if name not in known:
                hint = nearest(name, known) or f"; there are {', '.join(known)}"
                raise ValueError(f"{path}: {key}: unknown placeholder {{{name}}}{hint}")
    for key, fields in (
        ("sampling", task.sampling),
        ("generator.sampling", task.generator.sampling),
        ("critic.sampling", task.critic.sampling),
    ):
        for name in fields:
            if name not in FIELDS:
                raise ValueError(f"{path}: {key}: unknown field {name}{nearest(name, FIELDS)}")
    return task


def filled(template: str, values: Mapping[str, str]) -> str:
    """Return a template with its placeholders replaced; other braces stay."""
    return _PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), template)


def _said(message: str) -> str:
    """Return msgspec's message with the key first, and the nearest name for an unknown one."""
    if unknown := _UNKNOWN.fullmatch(message):
        name, place = unknown[1], unknown[2] or ""
        hint = nearest(name, PARTS[place].__struct_fields__)
        return f"unknown key {place + '.' if place else ''}{name}{hint}"
    if invalid := _INVALID.fullmatch(message):
        return f"{invalid[2]}: {invalid[1]}"
    return message
