"""Compares two grammar libraries: time to compile a schema, and time of a mask and its token.

Needs ``pip install llguidance xgrammar``, of which the engine uses the first. Not part of ``just bench``.
"""

import argparse
import importlib
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.config import EngineConfig
from engine.loading import load

# Each schema beside a document that it admits, written as models write.
CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "object": (
        {
            "type": "object",
            "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "ok": {"type": "boolean"}},
            "required": ["name", "age", "ok"],
            "additionalProperties": False,
        },
        {"name": "Ada Lovelace of London", "age": 36, "ok": True},
    ),
    "nested": (
        {
            "type": "object",
            "properties": {
                "items": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {
                            "kind": {"enum": ["animal", "plant", "mineral"]},
                            "tags": {"type": "array", "items": {"type": "string"}},
                            "weight": {"type": "number"},
                        },
                        "required": ["kind", "tags", "weight"],
                        "additionalProperties": False,
                    },
                }
            },
            "required": ["items"],
            "additionalProperties": False,
        },
        {
            "items": [
                {"kind": "animal", "tags": ["small", "furry and quick"], "weight": 1.5},
                {"kind": "mineral", "tags": [], "weight": 20000},
            ]
        },
    ),
    "pattern": (
        {
            "type": "object",
            "properties": {
                "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
                "day": {"type": "string", "format": "date"},
                "mail": {"type": "string", "format": "email"},
            },
            "required": ["code", "day", "mail"],
            "additionalProperties": False,
        },
        {"code": "AB-1234", "day": "2026-11-30", "mail": "ada@example.org"},
    ),
    "any_of": (
        {
            "type": "object",
            "properties": {
                "value": {
                    "anyOf": [
                        {"type": "string"},
                        {"type": "number"},
                        {"type": "null"},
                        {
                            "type": "object",
                            "properties": {"nested": {"type": "string"}},
                            "required": ["nested"],
                            "additionalProperties": False,
                        },
                    ]
                }
            },
            "required": ["value"],
            "additionalProperties": False,
        },
        {"value": {"nested": "some words of text that go on for a while"}},
    ),
    "recursion": (
        {
            "$ref": "#/$defs/node",
            "$defs": {
                "node": {
                    "type": "object",
                    "properties": {
                        "name": {"type": "string"},
                        "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
                    },
                    "required": ["name", "children"],
                    "additionalProperties": False,
                }
            },
        },
        {"name": "root", "children": [{"name": "leaf one", "children": []}, {"name": "two", "children": []}]},
    ),
    "any object": (
        {"type": "object"},
        {"title": "A few words", "list": [1, 2.5, None, True], "inner": {"k": "v"}},
    ),
}

LONG_VOCAB = 152_064


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a library gets to know of a tokenizer."""

    tokens: list[bytes]
    eos_token_id: int
    special_token_ids: list[int]


@dataclass(frozen=True, slots=True)
class Figures:
    """Milliseconds of a compilation; microseconds of a mask with its token."""

    compile_ms: float
    median_us: float
    p99_us: float


Step = Callable[[int], None]
"""Fills the mask, checks that it allows the token, and accepts that."""


class LLGuidance:
    """The library in use."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._library: Any = importlib.import_module("llguidance")
        self._vocab_size = len(vocabulary.tokens)
        source = _Source(vocabulary.tokens, vocabulary.eos_token_id, vocabulary.special_token_ids)
        self._tokenizer = self._library.LLTokenizer(self._library.TokenizerWrapper(source))

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of the longest tokens, from left to right."""
        ids: list[int] = self._tokenizer.greedy_tokenize(text)
        return ids

    def compile(self, schema: str) -> Callable[[], Step]:
        """Return what starts a fresh sequence."""
        grammar = f'%llguidance {{"no_forcing": true}}\nstart: %json {schema}'
        first = self._library.LLMatcher(self._tokenizer, grammar)
        if first.is_error():
            raise ValueError(first.get_error())

        def start() -> Step:
            matcher = first.deep_copy()
            mask = np.zeros((self._vocab_size + 31) // 32, np.uint32)

            def step(token_id: int) -> None:
                matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
                _check(mask, token_id)
                matcher.consume_token(token_id)

            return step

        return start


class _Source:
    """The tokenizer as llguidance reads it."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], eos_token_id: int, special_token_ids: list[int]) -> None:
        self.tokens, self.eos_token_id, self.special_token_ids = tokens, eos_token_id, special_token_ids

    def __call__(self, text: bytes) -> list[int]:
        return []


class XGrammar:
    """The other one."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._library: Any = importlib.import_module("xgrammar")
        self._vocab_size = len(vocabulary.tokens)
        special = set(vocabulary.special_token_ids)
        info = self._library.TokenizerInfo(
            [b"" if place in special else token for place, token in enumerate(vocabulary.tokens)],
            vocab_size=self._vocab_size,
            stop_token_ids=[vocabulary.eos_token_id],
        )
        self._compiler = self._library.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, schema: str) -> Callable[[], Step]:
        """Return what starts a fresh sequence."""
        compiled = self._compiler.compile_json_schema(schema, strict_mode=False)

        def start() -> Step:
            matcher = self._library.GrammarMatcher(compiled)
            mask = self._library.allocate_token_bitmask(1, self._vocab_size)
            words = mask.numpy()[0].view(np.uint32)

            def step(token_id: int) -> None:
                matcher.fill_next_token_bitmask(mask)
                _check(words, token_id)
                matcher.accept_token(token_id)

            return step

        return start


def _check(mask: np.ndarray[Any, np.dtype[np.uint32]], token_id: int) -> None:
    if not mask[token_id // 32] >> np.uint32(token_id % 32) & np.uint32(1):
        raise ValueError(f"token {token_id} is refused")


def measure(library: LLGuidance | XGrammar, schema: str, token_ids: Sequence[int], runs: int) -> Figures:
    """Compile a schema and run a document through it, several times each."""
    compiles, steps = [], []
    for _ in range(3):
        began = time.perf_counter()
        start = library.compile(schema)
        compiles.append(1e3 * (time.perf_counter() - began))
    for _ in range(runs):
        step = start()
        for token_id in token_ids:
            began = time.perf_counter()
            step(token_id)
            steps.append(1e6 * (time.perf_counter() - began))
    return Figures(statistics.median(compiles), statistics.median(steps), float(np.percentile(steps, 99)))


def vocabularies() -> dict[str, Vocabulary]:
    """Return the embedded model's vocabulary, and a long one that is made of it."""
    model, _ = load(EngineConfig(pack_weights=False))
    tokenizer = model.tokenizer
    tokens = [tokenizer.token_bytes(place) for place in range(tokenizer.vocab_size)]
    special = [place for place in range(len(tokens)) if tokenizer.is_special(place)]
    assert tokenizer.eos_token_id is not None
    draw = random.Random(0)  # noqa: S311 - no secret
    plain = [token for place, token in enumerate(tokens) if place not in set(special)]
    longer = dict.fromkeys(tokens)
    while len(longer) < LONG_VOCAB:
        longer[draw.choice(plain) + draw.choice(plain)] = None
    return {
        f"{len(tokens):,} tokens": Vocabulary(tokens, tokenizer.eos_token_id, special),
        f"{LONG_VOCAB:,} tokens": Vocabulary(list(longer), tokenizer.eos_token_id, special),
    }


def main(argv: Sequence[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20, help="documents per schema")
    runs = parser.parse_args(argv).runs
    print(f"{'':16}{'schema':12}{'library':12}{'compile ms':>12}{'median us':>12}{'p99 us':>12}")
    for name, vocabulary in vocabularies().items():
        llguidance = LLGuidance(vocabulary)
        for case, (schema, document) in CASES.items():
            token_ids = llguidance.tokenize(json.dumps(document))
            for library in (llguidance, XGrammar(vocabulary)):
                try:
                    figures = measure(library, json.dumps(schema), token_ids, runs)
                except (ValueError, RuntimeError) as error:
                    print(f"{name:16}{case:12}{type(library).__name__:12}  {error}")
                    continue
                print(
                    f"{name:16}{case:12}{type(library).__name__:12}{figures.compile_ms:12.2f}"
                    f"{figures.median_us:12.1f}{figures.p99_us:12.1f}"
                )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
