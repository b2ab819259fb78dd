"""The names of a request's fields, for files that are written by hand."""

import difflib
from collections.abc import Iterable

from logitwire.options import ChatOptions, CompleteOptions

FIELDS = frozenset(ChatOptions.__annotations__) | frozenset(CompleteOptions.__annotations__)
"""Those that this version knows. A server may know more."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint at the known name that is nearest to an unknown one; empty if none is near."""
    near = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""
