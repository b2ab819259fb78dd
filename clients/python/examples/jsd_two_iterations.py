"""A generator-critic step, twice, against a running server, and the divergence between the two generations.

The generator answers a task, a critic comments on the answer, and the generator answers again with that
comment in its history. Position by position, the Jensen-Shannon divergence says how far the critic moved the
generator's distribution: 0 bits is not at all, 1 bit is as far as can be. From the first position on at which
the tokens differ, the two rows also follow different texts.

Run:  python clients/python/examples/jsd_two_iterations.py [--base-url URL]
"""

import argparse

from logitwire import Client, Generation, jsd

TASK = "Write a slogan for a bicycle shop."
CRITIC = "What is wrong with this slogan, and how should it be changed?"


def main(argv: list[str] | None = None) -> None:
    """Run two iterations and print their divergence."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--max-tokens", type=int, default=20)
    options = parser.parse_args(argv)
    client = Client(options.base_url)

    def say(*contents: str) -> Generation:
        """Continue a conversation that alternates between user and assistant."""
        roles = ("user", "assistant")
        messages = [{"role": roles[place % 2], "content": text} for place, text in enumerate(contents)]
        return client.chat(messages, max_tokens=options.max_tokens, temperature=0.7, seed=1)

    first = say(TASK)
    critique = say(f"{CRITIC}\n\n{first.text}")
    second = say(TASK, first.text, f"{critique.text}\n\n{TASK}")

    print(f"iteration 1: {first.text!r}\ncritic:      {critique.text!r}\niteration 2: {second.text!r}\n")
    assert first.logits is not None
    assert second.logits is not None
    num = min(len(first.token_ids), len(second.token_ids))
    divergence = jsd(first.logits[:num], second.logits[:num])
    print(f"rows: {first.logits.shape} and {second.logits.shape}, {first.logits.dtype}\n")
    print("position  iteration 1     iteration 2     JSD (bits)")
    for position in range(num):
        one, two = first.tokens[position], second.tokens[position]
        print(f"{position:>8}  {one!r:<14}  {two!r:<14}  {divergence[position]:.6f}")
    print(f"\nmean over {num} positions: {divergence.mean():.6f} bits")


if __name__ == "__main__":
    main()
