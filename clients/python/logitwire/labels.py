"""Token texts as labels of a plot: white space made visible, and no character that no font can draw."""

import unicodedata
from functools import cache

try:
    from matplotlib.font_manager import fontManager
    from matplotlib.ft2font import FT2Font
except ImportError as error:
    raise ImportError("plots need matplotlib: pip install matplotlib") from error

MAX_LENGTH = 16

VISIBLE = {" ": "␣", "\n": "↵", "\r": "␍", "\t": "⇥"}

WANTED = (
    "DejaVu Sans",
    "Noto Sans",
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Noto Sans CJK KR",
    "Source Han Sans",
    "WenQuanYi Zen Hei",
    "Microsoft YaHei",
    "PingFang SC",
    "Hiragino Sans",
    "Malgun Gothic",
    "Noto Sans Arabic",
    "Noto Sans Hebrew",
    "Noto Sans Devanagari",
    "Noto Sans Thai",
    "Arial Unicode MS",
    "Noto Emoji",
)
"""Common families of wide coverage. matplotlib brings the first one along."""

FAMILIES = [family for family in WANTED if family in set(fontManager.get_font_names())]
"""Those that are installed; matplotlib tries them in this order for each character."""


def label(token: str) -> str:
    """Return a token as it is written below its position.

    Characters without a glyph in any of :data:`FAMILIES`, and those that show nothing, become escapes as in
    Python's strings.
    """
    text = "".join(_visible(character) for character in token) or "∅"
    return text if len(text) <= MAX_LENGTH else text[: MAX_LENGTH - 1] + "…"


def drawable(text: str) -> str:
    """Return a line of text with escapes in place of what cannot be drawn."""
    return "".join(character if character == " " else _visible(character) for character in text)


def _visible(character: str) -> str:
    if character in VISIBLE:
        return VISIBLE[character]
    # Controls, formats, unassigned ones, other separators, and marks that would sit on their neighbour.
    shows = unicodedata.category(character)[0] not in "CZM"
    if shows and ord(character) in _drawable():
        return character
    return character.encode("unicode_escape").decode("ascii")


@cache
def _drawable() -> frozenset[int]:
    """Return the code points that the installed families can draw."""
    found: set[int] = set()
    for entry in fontManager.ttflist:
        if entry.name in FAMILIES and entry.weight in (400, "normal", "regular") and entry.style == "normal":
            found |= FT2Font(entry.fname).get_charmap().keys()
    return frozenset(found)
