"""KDA's module: the bound of its decay."""

import pytest
import torch

from holdfast.nn import KDA
from parity import relative_error


def test_the_bound_holds():
    """A decay that is never below exp(lower_bound) keeps part of a state, however large the gate's inputs are."""
    torch.manual_seed(0)
    mixer = KDA(24, 2, head_dim=6, num_v_heads=4, expand_v=1.5, lower_bound=-0.5).double()
    with torch.no_grad():
        mixer.dt_bias.fill_(1e6)
    S = torch.ones(1, 4, 6, 9, dtype=torch.float64)
    tails = mixer(torch.zeros(1, 1, 24, dtype=torch.float64))[1][1:]
    # keys of zero write and erase nothing
    _, (after, *_) = mixer(torch.zeros(1, 4, 24, dtype=torch.float64), (S, *tails))
    assert relative_error(after, torch.exp(torch.tensor(-0.5 * 4)) * S) <= 1e-7


def test_a_bound_that_is_no_number_is_refused():
    with pytest.raises(TypeError, match="lower_bound: expected a number; got str"):
        KDA(24, 2, lower_bound="-5")
