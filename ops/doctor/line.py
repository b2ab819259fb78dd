"""What a check finds."""

from typing import Callable, Iterator, Mapping, NamedTuple

OK, WARN, FAIL = "ok", "warn", "fail"
GIB = 2**30
SET_UP = "./ops/just setup"


class Line(NamedTuple):
    """One finding.

    Attributes:
        status: One of the three above.
        what: Was looked at.
        found: There.
        remedy: What to do; empty if nothing.
    """

    status: str
    what: str
    found: str
    remedy: str = ""


Check = Callable[[Mapping[str, str]], Iterator[Line]]


class Unchecked(Exception):
    """A check cannot be made before another one passes."""
