import math

import pytest
import torch

from engine.rows import Extracts, token_stats
from engine.sampling import raw_logprobs
from engine.types import GenerationRequest, RowDtype

V = 50


def request(**fields: object) -> GenerationRequest:
    return GenerationRequest(request_id="x", prompt_token_ids=(1,), max_tokens=1, **fields)  # type: ignore[arg-type]


def logits_of(seed: int, rows: int = 4) -> torch.Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * 5


def test_each_row_gets_what_its_own_request_asked_for() -> None:
    logits = logits_of(0)
    before = logits.clone()
    extracts = Extracts(
        logits,
        [1, 2, 3, 4],
        [
            request(),
            request(logprobs=True, num_top_logprobs=2, row_dtype=RowDtype.FLOAT16),
            request(token_stats=True, row_dtype=RowDtype.FLOAT32),
            request(logit_token_ids=(7, 7, 0)),
        ],
    )
    assert torch.equal(logits, before)
    assert set(extracts.logprobs) == {1, 2}
    assert set(extracts.top_logprobs) == {1}
    assert len(extracts.top_logprobs[1].token_ids) == 2
    assert set(extracts.stats) == {2}
    assert set(extracts.rows) == {1, 2}
    assert torch.equal(torch.tensor(extracts.rows[1]), logits[1].half())
    assert torch.equal(torch.tensor(extracts.rows[2]), logits[2])
    assert set(extracts.selected) == {3}
    assert extracts.selected[3].tolist() == logits[3, [7, 7, 0]].tolist()


def test_no_two_rows_share_memory_and_none_is_writeable() -> None:
    logits = logits_of(1)
    rows = Extracts(logits, [0] * 4, [request(row_dtype=RowDtype.FLOAT32)] * 4).rows
    assert all(not row.flags.writeable for row in rows.values())
    logits.zero_()
    assert all(row.any() for row in rows.values())


@pytest.mark.parametrize("seed", range(20))
def test_the_argmax_has_exactly_the_logprob_of_its_top_entry(seed: int) -> None:
    logits = logits_of(seed)
    best = logits.argmax(-1).tolist()
    extracts = Extracts(logits, best, [request(logprobs=True, num_top_logprobs=3)] * 4)
    for row in range(4):
        top = extracts.top_logprobs[row]
        assert top.token_ids[0] == best[row]
        assert top.logprobs[0] == extracts.logprobs[row]
        assert top.logprobs == sorted(top.logprobs, reverse=True)


def test_more_alternatives_than_the_vocabulary_are_the_vocabulary() -> None:
    extracts = Extracts(logits_of(0), [0] * 4, [request(logprobs=True, num_top_logprobs=V + 10)] * 4)
    assert len(extracts.top_logprobs[0].token_ids) == V


def test_statistics_of_rows_with_probabilities_of_zero_are_exact() -> None:
    raw = torch.full((2, 4), -math.inf)
    raw[0, 1] = 3.0
    raw[1] = torch.tensor([1.0, 1.0, -math.inf, 0.0])
    certain, tied = token_stats(raw, raw_logprobs(raw), torch.tensor([[1], [1]]))
    assert (certain.entropy, certain.logsumexp, certain.rank, certain.margin) == (0, 3, 1, math.inf)
    assert (tied.rank, tied.margin) == (1, 0)
    p = [math.e / (2 * math.e + 1)] * 2 + [1 / (2 * math.e + 1)]
    assert tied.entropy == pytest.approx(-sum(each * math.log(each) for each in p), abs=1e-6)
