"""DeltaNet's and Gated DeltaNet's modules: with an op in the place of their own, and checkpoints of before."""

import copy
import io
import pickle

import pytest
import torch

from holdfast.nn import DeltaNet, GatedDeltaNet
from parity import relative_error

MIXERS = {
    "deltanet": lambda: DeltaNet(24, 3, conv_width=3),
    "gated deltanet": lambda: GatedDeltaNet(24, 2, num_v_heads=4, expand_v=1.5, allow_neg_eigval=True),
}
# of checkpoints with a weight for each projection, in the order of in_proj's rows
BEFORE = {"deltanet": ("qkv_proj", "beta_proj"), "gated deltanet": ("qkv_proj", "gate_proj", "decay_beta_proj")}
every = pytest.mark.parametrize("name", MIXERS)


@every
@pytest.mark.parametrize("offsets", [None, (0, 5, 6, 6, 20)])
def test_an_op_in_the_place_of_its_own_gets_what_its_own_would(name, offsets):
    """As holdfast.parallel puts one there."""
    mixer = MIXERS[name]().double()
    own, calls = type(mixer).op, []

    def instead(*tensors, **options):
        calls.append(options)
        return own(*tensors, **options)

    x = torch.randn(1, 20, 24, dtype=torch.float64, requires_grad=True)
    cu_seqlens = None if offsets is None else torch.tensor(offsets)

    def results():
        y, state = mixer(x, cu_seqlens=cu_seqlens)
        loss = y.sin().sum() + sum(part.square().sum() for part in state)
        return [y, *state, *torch.autograd.grad(loss, [x, *mixer.parameters()])]

    right = results()
    mixer.op = instead
    for got, exact in zip(results(), right, strict=True):
        assert relative_error(got, exact) <= 1e-11
    assert len(calls) == 1


@every
def test_a_checkpoint_with_a_weight_for_each_projection_is_read(name):
    mixer = torch.nn.Sequential(MIXERS[name](), torch.nn.Identity())
    (inner, _), now = mixer, mixer.state_dict()
    sizes = [sum(inner.widths[:3]), *inner.widths[3:]]
    if name == "gated deltanet":
        sizes[2:] = [sum(sizes[2:])]
    rows = now.pop("0.in_proj.weight").split([*sizes, inner.in_proj.out_features - sum(sizes)])
    before = now | {f"0.{part}.weight": x for part, x in zip(BEFORE[name], rows, strict=False)}
    keys = list(before)
    other = torch.nn.Sequential(MIXERS[name](), torch.nn.Identity())
    other.load_state_dict(before)
    assert list(before) == keys
    assert all(torch.equal(x, y) for x, y in zip(mixer.parameters(), other.parameters(), strict=True))
    with pytest.raises(RuntimeError, match="qkv_proj"):
        other.load_state_dict(now | {"0.qkv_proj.weight": rows[0]})
    inner.load_state_dict({part.removeprefix("0."): x for part, x in before.items()})


@every
def test_rows_of_the_projection_that_nothing_reads_stay_zero(name):
    mixer = MIXERS[name]()
    used = sum(mixer.widths)
    assert mixer.in_proj.out_features % 16 == 0
    assert 0 <= mixer.in_proj.out_features - used < 16
    assert not mixer.in_proj.weight[used:].any()
    mixer(torch.randn(2, 9, 24))[0].square().sum().backward()
    assert not mixer.in_proj.weight.grad[used:].any()
    assert mixer.in_proj.weight.grad[:used].abs().sum(1).min() > 0


@every
def test_it_may_be_copied_and_pickled(name):
    mixer, x = MIXERS[name](), torch.randn(2, 9, 24)
    file = io.BytesIO()
    torch.save(mixer, file)
    file.seek(0)
    for other in (copy.deepcopy(mixer), pickle.loads(pickle.dumps(mixer)), torch.load(file, weights_only=False)):
        assert torch.equal(other(x)[0], mixer(x)[0])
