"""The learning rate and the steps of the optimizer."""

import math

import pytest
import torch

from holdfast.cli.schedule import learning_rate, make_optimizer, update


class Weights(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.matrix = torch.nn.Parameter(torch.ones(2, 2))
        self.vector = torch.nn.Parameter(torch.ones(3))
        self.fixed = torch.nn.Parameter(torch.ones(4), requires_grad=False)


def test_the_rate_at_points_of_the_cosine():
    """A quarter, a half and all of the way from the peak to a floor of a fifth."""
    rates = [learning_rate(step, 104, 2.0, 4, floor=0.2) for step in (0, 2, 4, 29, 54, 104, 200)]
    part = 0.5 * (1 + math.cos(math.pi / 4))
    assert rates == pytest.approx([0.5, 1.5, 2.0, 2 * (0.2 + 0.8 * part), 2 * 0.6, 0.4, 0.4])
    # nothing but a warm-up
    assert learning_rate(4, 4, 1.0, 4) == pytest.approx(1.0)


def test_the_optimizer_decays_by_a_tenth_and_forgets_as_it_says():
    optimizer = make_optimizer(Weights(), 1e-3)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert {group["betas"] for group in optimizer.param_groups} == {(0.9, 0.95)}
    assert [p.shape for group in optimizer.param_groups for p in group["params"]] == [(2, 2), (3,)]
    assert [group["weight_decay"] for group in make_optimizer(Weights(), 1e-3, 0.0).param_groups] == [0.0, 0.0]
    only_vectors = make_optimizer(torch.nn.LayerNorm(3), 1e-3)
    assert len(only_vectors.param_groups) == 1


def test_a_step_is_clipped_takes_the_given_rate_and_leaves_no_gradient():
    model = Weights()
    optimizer, clipped = make_optimizer(model, 123.0), []
    optimizer.register_step_pre_hook(lambda *_: clipped.append([p.grad.clone() for p in (model.matrix, model.vector)]))
    (4 * model.matrix.sum() + 3 * model.vector.sum()).backward()
    update(model, optimizer, 0.25)
    norm = math.sqrt(4 * 16 + 3 * 9)
    assert clipped[0][0] == pytest.approx(torch.full((2, 2), 4 / norm), rel=1e-4)
    assert clipped[0][1] == pytest.approx(torch.full((3,), 3 / norm), rel=1e-4)
    # Adam's first step is the rate, whatever the gradient; a matrix decays by rate * 0.1 first
    assert model.vector.tolist() == pytest.approx([0.75] * 3)
    assert model.matrix.flatten().tolist() == pytest.approx([1 - 0.025 - 0.25] * 4)
    assert model.fixed.tolist() == [1.0] * 4
    assert model.matrix.grad is model.vector.grad is None


def test_a_small_gradient_is_not_clipped():
    model = Weights()
    optimizer, seen = make_optimizer(model, 1.0), []
    optimizer.register_step_pre_hook(lambda *_: seen.append(model.vector.grad.clone()))
    (0.1 * model.vector.sum()).backward()
    update(model, optimizer, 1e-3)
    assert seen[0].tolist() == pytest.approx([0.1] * 3)
