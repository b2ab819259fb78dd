"""How sure a model is of a text, token by token, and whether it is right as often as it is sure.

``/v1/logits`` scores the tokens of a text as they are. No row has to travel: the server computes entropy,
rank and the best alternative of each position over the whole vocabulary, and sends a few numbers per token.
The calibration table sorts the positions by the probability of the model's favourite, and says how often the
favourite was the token that is really there.

Run:  python clients/python/examples/calibration_of_a_text.py [FILE] [--base-url URL] [--per-token]
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from logitwire import Client, LogitwireError, Score

DEFAULT_TEXT = Path(__file__).with_name("lighthouse.txt")
NUM_BINS = 10
HEAD = "position  token             logprob (nats)  surprise (bits)  entropy (nats)  entropy (bits)    rank"


@dataclass(frozen=True)
class Bin:
    """The positions whose top probability lies in one interval.

    Attributes:
        low: Its lower end, which belongs to the bin below, except for 0.
        high: Its upper end.
        num: How many positions there are.
        confidence: Mean top probability; 0 if there are none.
        accuracy: Share of positions whose top token is the actual one; 0 if there are none.
    """

    low: float
    high: float
    num: int
    confidence: float
    accuracy: float


def reliability(
    top_probs: NDArray[np.float64], is_right: NDArray[np.bool_], num_bins: int = NUM_BINS
) -> list[Bin]:
    """Return the reliability diagram as a table: bins of equal width over (0, 1].

    Source: Guo et al. (2017), "On Calibration of Modern Neural Networks", section 2.

    Args:
        top_probs: (T,) in 0..1: the probability of the model's favourite at each position.
        is_right: (T,): whether the favourite is the actual token.
        num_bins: How many bins.

    Returns:
        All bins, the empty ones too; their ``num`` add up to T.
    """
    edges = np.linspace(0, 1, num_bins + 1)
    places = np.searchsorted(edges[1:-1], top_probs, side="left")
    bins = []
    for place in range(num_bins):
        inside = places == place
        num = int(inside.sum())
        confidence = float(top_probs[inside].mean()) if num else 0.0
        accuracy = float(is_right[inside].mean()) if num else 0.0
        bins.append(Bin(float(edges[place]), float(edges[place + 1]), num, confidence, accuracy))
    return bins


def expected_calibration_error(bins: Sequence[Bin]) -> float:
    """Return the mean gap between accuracy and confidence, 0..1; 0 is perfectly calibrated.

    ECE is the sum over all bins b of ``num_b / T * abs(accuracy_b - confidence_b)``. Source: Naeini et al.
    (2015), "Obtaining Well Calibrated Probabilities Using Bayesian Binning"; in this form Guo et al. (2017).

    Raises:
        ValueError: All bins are empty.
    """
    num = sum(each.num for each in bins)
    if not num:
        raise ValueError("there are no positions")
    return sum(each.num * abs(each.accuracy - each.confidence) for each in bins) / num


def token_line(result: Score, place: int) -> str:
    """Return one position's numbers; natural logarithms are nats, and divided by ln 2 they are bits."""
    logprob, entropy = float(result.logprobs[place]), result.columns["entropy"][place]
    return (
        f"{result.positions[place]:>8}  {result.tokens[place]!r:<16}  {logprob:>14.4f}  "
        f"{-logprob / math.log(2):>15.4f}  {entropy:>14.4f}  {entropy / math.log(2):>14.4f}  "
        f"{result.columns['rank'][place]:>6}"
    )


def main(argv: list[str] | None = None) -> None:
    """Score a text, and print its means, its calibration and its surprises."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", nargs="?", type=Path, default=DEFAULT_TEXT, help="UTF-8; at most a context")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--surprises", type=int, default=5, help="how many of the least expected tokens")
    parser.add_argument("--per-token", action="store_true", help="print a line for every token")
    options = parser.parse_args(argv)
    try:
        text = options.file.read_text(encoding="utf-8")
        (result,) = Client(options.base_url).score(
            [{"text": text}], logits=None, token_stats=True, top_logprobs=1
        )
    except (OSError, UnicodeDecodeError, LogitwireError) as error:
        raise SystemExit(f"{options.file} was not scored: {error}") from error
    num = len(result.positions)
    if not num:
        raise SystemExit(f"{options.file} has one token, and nothing predicts the first one")

    logprob = float(result.logprobs.mean(dtype=np.float64))
    entropy = float(np.mean(result.columns["entropy"]))
    print(f"{options.file.name}: {num} tokens with a prediction (the first of all has none)\n")
    print(f"mean logprob:  {logprob:.6f} nats, perplexity {math.exp(-logprob):.3f}")
    print(f"mean entropy:  {entropy:.6f} nats, {entropy / math.log(2):.6f} bits")
    if options.per_token:
        print(f"\n{HEAD}")
        print("\n".join(token_line(result, place) for place in range(num)))

    top_probs = np.exp(np.array([each[0] for each in result.columns["top_logprobs"]], np.float64))
    favourites = [each[0] for each in result.columns["top_token_ids"]]
    is_right = np.equal(favourites, result.columns["token_id"])
    bins = reliability(top_probs, is_right)
    print("\ntop probability  tokens  mean probability  top token was right")
    for each in bins:
        values = f"{each.confidence:>16.4f}  {each.accuracy:>19.4f}" if each.num else f"{'-':>16}  {'-':>19}"
        print(f"{each.low:>6.1f} to {each.high:.1f}    {each.num:>6}  {values}")
    print(f"\nexpected calibration error: {expected_calibration_error(bins):.6f}")
    print(f"top token was right: {is_right.mean():.4f}, mean top probability: {top_probs.mean():.4f}")

    print(f"\nmost surprising tokens\n{HEAD}")
    for place in np.argsort(result.logprobs, kind="stable")[: max(0, options.surprises)]:
        print(token_line(result, int(place)))


if __name__ == "__main__":
    main()
