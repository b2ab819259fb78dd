"""The formulas inside the examples, which are programs and no modules."""

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import rel_entr, softmax

EXAMPLES = Path(__file__).resolve().parents[3] / "clients/python/examples"


def names_of(example: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / example), run_name="example")


def test_bins_hold_every_position_once_and_their_gaps_make_the_error() -> None:
    names = names_of("calibration_of_a_text.py")
    top_probs = np.array([1e-9, 0.1, 0.1000001, 0.5, 0.55, 1.0])
    is_right = np.array([False, True, False, True, False, True])
    bins = names["reliability"](top_probs, is_right)
    assert [each.num for each in bins] == [2, 1, 0, 0, 1, 1, 0, 0, 0, 1]
    assert (bins[0].low, bins[0].high, bins[0].accuracy) == (0, 0.1, 0.5)
    assert bins[2].confidence == bins[2].accuracy == 0
    gaps = [2 * abs(0.5 - 0.05), 0.1, 0.5, 0.55, 0]
    assert names["expected_calibration_error"](bins) == pytest.approx(sum(gaps) / 6, abs=1e-6)
    with pytest.raises(ValueError, match="no positions"):
        names["expected_calibration_error"](names["reliability"](top_probs[:0], is_right[:0]))


def test_the_loss_is_the_whole_divergence_and_has_a_gradient_where_the_teacher_says_never() -> None:
    kl_per_position = names_of("distill_tiny_student.py")["kl_per_position"]
    generator = torch.Generator().manual_seed(3)
    teacher, student = (3 * torch.randn(4, 50, generator=generator) for _ in range(2))
    teacher[0, :7] = -torch.inf
    student.requires_grad_()
    loss = kl_per_position(teacher, student)
    p, q = (softmax(each.detach().double().numpy(), axis=-1) for each in (teacher, student))
    np.testing.assert_allclose(loss.detach().numpy(), rel_entr(p, q).sum(-1), rtol=1e-5)
    loss.sum().backward()
    assert student.grad is not None
    # The gradient of the divergence by the student's logits is Q - P.
    np.testing.assert_allclose(student.grad.numpy(), q - p, atol=1e-6)
