import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import LogitsOverflowError, NonFiniteLogitsError
from engine.sampling import SampledRow, raw_logprobs, row_fault, sample
from engine.types import RowDtype, SamplingParams

V = 50

params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 5e-324, 1e-6, 0.3, 1.0, 2.0, 100.0]),
    top_p=st.sampled_from([0.0, 1e-9, 0.5, 1.0]),
    top_k=st.sampled_from([0, 1, 5, 1000]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
    repetition_penalty=st.sampled_from([5e-324, 1e-39, 0.5, 1.0, 2.0, 100.0]),
    frequency_penalty=st.sampled_from([-2.0, 0.0, 1.5]),
    presence_penalty=st.sampled_from([-2.0, 0.0, 0.5]),
    logit_bias=st.sampled_from([(), ((3, 100.0), (V - 1, -100.0))]),
)


def logits_of(seed: int, rows: int = 3, scale: float = 5.0) -> torch.Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * scale


def draw(
    logits: torch.Tensor,
    settings: SamplingParams,
    seed: int = 0,
    num_ids: int = V,
    *,
    history: tuple[int, ...] = (1, 2, 3),
    num_prompt_tokens: int = 1,
    forbidden: tuple[int, ...] = (),
) -> list[int]:
    rows = [
        SampledRow(history, num_prompt_tokens, torch.Generator().manual_seed(seed + row), forbidden)
        for row in range(len(logits))
    ]
    return sample(logits, settings, rows, num_ids=num_ids)[0]


@settings(deadline=None)
@given(params, st.integers(0, 99), st.integers(1, V))
def test_no_setting_writes_into_raw_rows_or_chooses_padding(
    sampling: SamplingParams, seed: int, num_ids: int
) -> None:
    logits = logits_of(seed)
    before = logits.clone()
    chosen = draw(logits, sampling, seed, num_ids)
    assert torch.equal(logits, before)
    assert all(0 <= each < num_ids for each in chosen)


@settings(deadline=None)
@given(params, st.integers(0, 99))
def test_a_row_is_drawn_alike_alone_and_in_a_group(sampling: SamplingParams, seed: int) -> None:
    logits = logits_of(seed)
    together = draw(logits, sampling, seed)
    alone = [draw(logits[row : row + 1], sampling, seed + row)[0] for row in range(len(logits))]
    assert together == alone


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-12, 1e-6, 1e-5, 1e-4])
def test_tiny_temperatures_pick_the_argmax(temperature: float) -> None:
    logits = logits_of(1, scale=30.0)
    assert draw(logits, SamplingParams(temperature=temperature)) == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    "sampling", [SamplingParams(top_k=1), SamplingParams(top_p=0), SamplingParams(top_p=1e-9)]
)
def test_filters_that_leave_one_token_pick_the_argmax(sampling: SamplingParams) -> None:
    logits = logits_of(2)
    assert draw(logits, sampling) == logits.argmax(-1).tolist()


def test_the_lowest_id_wins_a_tie() -> None:
    logits = torch.zeros(1, V)
    logits[0, [7, 30]] = 1.0
    assert draw(logits, SamplingParams(temperature=0)) == [7]


def test_draws_follow_the_softmax() -> None:
    logits = torch.full((4000, 3), -math.inf)
    logits[:, 0], logits[:, 2] = math.log(0.25), math.log(0.75)
    chosen = draw(logits, SamplingParams(), num_ids=3)
    assert set(chosen) == {0, 2}
    # 4000 draws at 0.75: the standard deviation is 0.007, so a false alarm comes once in about 1e8.
    assert abs(chosen.count(2) / 4000 - 0.75) < 0.04


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_seen_ids() -> None:
    logits = torch.full((1, V), -5.0)
    logits[0, 1], logits[0, 9] = 3.0, 2.0
    assert draw(logits, SamplingParams(temperature=0, repetition_penalty=2.0)) == [9]


def test_raw_logprobs_are_float32_over_the_whole_row() -> None:
    logits = logits_of(3).to(torch.bfloat16)
    exact = logits.double().numpy()
    exact = exact - np.log(np.exp(exact).sum(-1, keepdims=True))
    ours = raw_logprobs(logits)
    assert ours.dtype == torch.float32
    np.testing.assert_allclose(ours.numpy(), exact, atol=1e-5)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_infinity_are_faults_whether_or_not_rows_were_asked_for(value: float) -> None:
    row = torch.zeros(V)
    row[5] = value
    for dtype in (None, RowDtype.FLOAT16, RowDtype.FLOAT32):
        assert isinstance(row_fault(row, dtype), NonFiniteLogitsError)


@pytest.mark.parametrize("value", [65505.0, -65505.0, 1e30])
def test_a_finite_value_beyond_float16_is_a_fault_of_float16_rows_only(value: float) -> None:
    row = torch.zeros(V)
    row[5], row[6] = value, -math.inf
    assert isinstance(row_fault(row, RowDtype.FLOAT16), LogitsOverflowError)
    assert row_fault(row, RowDtype.FLOAT32) is None
    assert row_fault(row, None) is None


def test_minus_infinity_and_the_largest_float16_are_no_faults() -> None:
    row = torch.zeros(V)
    row[5], row[6] = -math.inf, 65504.0
    assert row_fault(row, RowDtype.FLOAT16) is None


GREEDY = SamplingParams(temperature=0)


def row(*values: float) -> torch.Tensor:
    return torch.tensor([values])


def test_a_bias_moves_the_choice_and_leaves_ids_of_the_padding_alone() -> None:
    biased = replace(GREEDY, logit_bias=((1, 5.0), (3, 100.0)))
    assert draw(row(4.0, 0.0, 3.0, 9.0), biased, num_ids=3, history=(0,)) == [1]
    banned = replace(GREEDY, logit_bias=((0, -100.0),))
    assert draw(row(4.0, 0.0, 3.0), banned, num_ids=3, history=(0,)) == [2]


def test_the_frequency_penalty_counts_and_the_presence_penalty_does_not() -> None:
    # The completion holds id 0 three times and id 1 once; the prompt's 2 does not count.
    history = (2, 0, 0, 1, 0)
    logits = row(5.0, 4.0, 1.0, 2.5)
    assert draw(logits, GREEDY, num_ids=4, history=history) == [0]
    assert draw(logits, replace(GREEDY, frequency_penalty=1.0), num_ids=4, history=history) == [1]
    assert draw(logits, replace(GREEDY, presence_penalty=2.0), num_ids=4, history=history) == [0]
    assert draw(logits, replace(GREEDY, frequency_penalty=1.9), num_ids=4, history=history) == [3]
    assert draw(logits, replace(GREEDY, presence_penalty=-2.0), num_ids=4, history=(2, 1)) == [1]


def test_the_repetition_penalty_looks_at_the_prompt_too() -> None:
    logits = row(5.0, 4.0)
    assert draw(logits, replace(GREEDY, repetition_penalty=2.0), num_ids=2, history=(0,)) == [1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_forbidden_id_is_not_chosen_however_likely(temperature: float) -> None:
    logits = row(50.0, 1.0, 0.0)
    chosen = draw(logits, SamplingParams(temperature=temperature), num_ids=3, forbidden=(0,))
    assert chosen[0] in (1, 2)
