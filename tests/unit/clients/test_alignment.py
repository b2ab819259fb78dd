import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logitwire import align, common_prefix, jsd

IDS = st.lists(st.integers(0, 4), max_size=30)


def longest(a: list[int], b: list[int]) -> int:
    """The textbook's length of a longest common subsequence."""
    lengths = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, one in enumerate(a):
        for j, other in enumerate(b):
            best = max(lengths[i][j + 1], lengths[i + 1][j])
            lengths[i + 1][j + 1] = lengths[i][j] + 1 if one == other else best
    return lengths[-1][-1]


def pairs(a: list[int], b: list[int]) -> list[tuple[int, int]]:
    found = align(a, b)
    return list(zip(found.a_positions.tolist(), found.b_positions.tolist(), strict=True))


def test_the_common_prefix_ends_where_tokens_differ_or_one_sequence_does() -> None:
    assert common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert common_prefix([1, 2], [1, 2, 3]) == 2
    assert common_prefix([1], [2]) == common_prefix([], [1]) == 0


def test_the_first_difference_is_comparable_and_what_follows_it_is_of_another_kind() -> None:
    found = align([5, 6, 7, 8, 9], [5, 6, 1, 2, 8, 9])
    assert pairs([5, 6, 7, 8, 9], [5, 6, 1, 2, 8, 9]) == [(0, 0), (1, 1), (2, 2), (3, 4), (4, 5)]
    assert found.kinds == ["same prefix"] * 3 + ["same token"] * 2
    assert found.same_prefix().kinds == ["same prefix"] * 3
    assert found.same_prefix().a_positions.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([], [], []),
        ([], [1, 2], []),
        ([1], [1], [(0, 0)]),
        ([1], [2], [(0, 0)]),
        ([1, 2, 3], [1, 2, 3], [(0, 0), (1, 1), (2, 2)]),
        ([1, 2], [1, 2, 3], [(0, 0), (1, 1)]),
    ],
)
def test_short_and_equal_sequences_align(a: list[int], b: list[int], expected: list[tuple[int, int]]) -> None:
    assert pairs(a, b) == expected
    assert align(a, b).num_same_prefix == len(expected)


@given(a=IDS, b=IDS)
def test_behind_the_first_difference_a_longest_common_subsequence_is_paired(
    a: list[int], b: list[int]
) -> None:
    found = align(a, b)
    num = found.num_same_prefix
    assert num == min(common_prefix(a, b) + 1, len(a), len(b))
    later = pairs(a, b)[num:]
    assert all(a[i] == b[j] for i, j in later)
    assert len(later) == longest(a[num:], b[num:])
    for positions in (found.a_positions, found.b_positions):
        assert (np.diff(positions) > 0).all()


def test_sequences_of_a_context_that_have_nothing_or_everything_in_common_align() -> None:
    num = 4096
    assert pairs(list(range(num)), list(range(num, 2 * num))) == [(0, 0)]
    assert pairs([7] * num, [8] + [7] * num) == [(0, 0), *((place, place) for place in range(1, num))]


def test_the_divergence_of_an_alignment_is_that_of_its_rows() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(5, 40)).astype(np.float16), rng.normal(size=(6, 40)).astype(np.float16)
    found = align([5, 6, 7, 8, 9], [5, 6, 1, 2, 8, 9])
    np.testing.assert_array_equal(found.jsd(a, b), jsd(a, b[[0, 1, 2, 4, 5]]))
    np.testing.assert_array_equal(found.same_prefix().jsd(a, b, "e"), jsd(a[:3], b[:3], "e"))
    with pytest.raises(ValueError, match="row 4 is asked for, and there are 4 rows"):
        found.jsd(a[:4], b)
