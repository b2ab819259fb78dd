"""Distillation over HTTP: a tiny student in torch learns from a teacher's complete rows, step by step.

The teacher is whatever model a logitwire server runs. ``/v1/logits`` returns its raw row at every position of
the texts below, so the loss is the exact KL divergence over the whole vocabulary, not one over some top-k.
Nothing is kept: while the student takes a step, a thread receives the rows of the next one. Torch is needed
here only; the package ``logitwire`` does without.

Run:  python clients/python/examples/distill_tiny_student.py [--base-url URL] [--steps 30]
"""

import argparse
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Literal

import torch
from torch import Tensor, nn

from logitwire import Client, LogitwireError

TEXTS = (
    "The river was low that summer, and the children walked across it in the morning.",
    "In the morning the baker opens the door, and the smell of bread fills the street.",
    "A good tool is one that you forget while you are using it.",
    "The old clock in the hall was wrong, but it was always wrong by the same amount.",
    "When the rain stopped, the farmer went out to look at the field behind the house.",
    "The train to the coast leaves at noon, and the train back leaves in the evening.",
    "She wrote the letter twice, and then she put both of them in the fire.",
    "The teacher asked a question, and the student who sat at the back knew the answer.",
)
TEXTS_PER_STEP = 4


@dataclass(frozen=True)
class Batch:
    """What the teacher says of some texts; each is padded to T, that of the longest one.

    Attributes:
        inputs: int64 (B, T). The student reads ``inputs[b, :t + 1]`` to predict position t.
        teacher_logits: float32 (B, T, V), raw. ``teacher_logits[b, t]`` predicts the token after
            ``inputs[b, t]``.
        mask: bool (B, T), False where a text is over.
    """

    inputs: Tensor
    teacher_logits: Tensor
    mask: Tensor


class Student(nn.Module):  # type: ignore[misc] # the checker does not follow torch
    """An embedding, one small recurrent layer and a head, over the teacher's vocabulary."""

    def __init__(self, vocab_size: int, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.layer = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return raw logits, float32 (B, T, V), of ids, int64 (B, T)."""
        hidden, _ = self.layer(self.embedding(inputs))
        logits: Tensor = self.head(hidden)
        return logits


def kl_per_position(teacher_logits: Tensor, student_logits: Tensor) -> Tensor:
    """Return KL(teacher || student) in nats, exact over all of V.

    With P = softmax(teacher) and Q = softmax(student) it is the sum of P ln(P / Q). Source: Kullback and
    Leibler (1951), "On Information and Sufficiency"; as a loss of distillation: Hinton et al. (2015),
    "Distilling the Knowledge in a Neural Network", here at temperature 1.

    Args:
        teacher_logits: float32 (..., V); -inf is a probability of 0, which contributes 0.
        student_logits: float32 (..., V), finite.

    Returns:
        float32 (...).
    """
    teacher, student = teacher_logits.log_softmax(-1), student_logits.log_softmax(-1)
    probs = teacher.exp()
    return (probs * torch.where(probs > 0, teacher - student, 0.0)).sum(-1)


def teacher_batch(client: Client, texts: tuple[str, ...], logits: Literal["float16", "float32"]) -> Batch:
    """Return the teacher's rows of some texts.

    Raises:
        LogitwireError: The server refused or failed the request, or cannot be reached.
    """
    results = client.score([{"text": text} for text in texts], logits=logits)
    longest = max(len(each.positions) for each in results)
    inputs = torch.zeros(len(results), longest, dtype=torch.int64)
    teacher_logits = torch.zeros(len(results), longest, results[0].metadata["vocab_size"])
    mask = torch.zeros(len(results), longest, dtype=torch.bool)
    for place, result in enumerate(results):
        # The first token has no row; the row of the next one is what follows from the first.
        num = len(result.positions)
        inputs[place, :num] = torch.tensor(result.token_ids[:-1])
        # A copy, and float32 from here on: what was received into is read-only.
        teacher_logits[place, :num] = torch.tensor(result.logits)
        mask[place, :num] = True
    return Batch(inputs, teacher_logits, mask)


def stream(client: Client, num: int, logits: Literal["float16", "float32"]) -> Iterator[Batch]:
    """Give out so many batches, at least one; the next one is received while the caller works on one."""
    texts = cycle(TEXTS)

    def ask() -> Future[Batch]:
        return receiver.submit(teacher_batch, client, tuple(islice(texts, TEXTS_PER_STEP)), logits)

    with ThreadPoolExecutor(1) as receiver:
        coming = ask()
        for _ in range(num - 1):
            current, coming = coming, ask()
            yield current.result()
        yield coming.result()


def main(argv: list[str] | None = None) -> None:
    """Train, and print the loss of every step."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--logits", choices=["float16", "float32"], default="float16", help="of the rows")
    parser.add_argument("--threads", type=int, default=1, help="of the student; the teacher needs some too")
    options = parser.parse_args(argv)
    if options.steps < 1:
        parser.error("--steps must be at least 1")
    torch.set_num_threads(options.threads)
    torch.manual_seed(1)
    losses: list[float] = []
    started = time.perf_counter()
    try:
        for step, batch in enumerate(stream(Client(options.base_url), options.steps, options.logits)):
            if step == 0:
                student = Student(batch.teacher_logits.shape[-1])
                optimizer = torch.optim.Adam(student.parameters(), lr=0.02)
                print("step  positions  KL(teacher || student), nats")
            loss = kl_per_position(batch.teacher_logits[batch.mask], student(batch.inputs)[batch.mask]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            print(f"{step:>4}  {int(batch.mask.sum()):>9}  {losses[-1]:.4f}", flush=True)
    except LogitwireError as error:
        raise SystemExit(f"the teacher gave no rows: {error}") from error
    took_s = time.perf_counter() - started
    print(f"\nfrom {losses[0]:.4f} to {losses[-1]:.4f} nats in {len(losses)} steps, {took_s:.1f} s")


if __name__ == "__main__":
    main()
