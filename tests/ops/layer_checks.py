"""What tests of ops between projections share; `layer` is the module with a layer's calls, such as `kda_layers`."""

from types import ModuleType

import torch
from torch.utils.checkpoint import checkpoint

from ops.delta_layers import values_and_grads
from parity import relative_error
from test_strides import Compared


def assert_as_near_as_parts(layer: ModuleType, dtype, seeds, sizes, device="cpu", runs=1, floor=1e-6):
    """To float64, over several draws: of a head's one number, such as A_log's gradient, one draw's error says little.

    runs: how often the op runs, to the same bits.
    """
    errors: dict[str, list[tuple[float, float]]] = {}
    for seed in seeds:
        tensors, rest = layer.example(**sizes, dtype=dtype, device=device, seed=seed)
        exact = values_and_grads(layer.fused, tensors, rest, dtype=torch.float64)
        got, *again = (values_and_grads(layer.fused, tensors, rest) for _ in range(runs))
        theirs = values_and_grads(layer.composed, tensors, rest)
        for name, x in exact.items():
            assert got[name].dtype == theirs[name].dtype, name
            assert all(torch.equal(got[name], each[name]) for each in again), name
            pair = tuple(relative_error(found[name].double(), x) for found in (got, theirs))
            errors.setdefault(name, []).append(pair)
    for name, pairs in errors.items():
        mine, by_parts = torch.tensor(pairs).square().mean(0).sqrt().tolist()
        assert mine <= max(2 * by_parts, floor), (name, mine, by_parts)


def assert_autocast_leaves_the_projections_dtype(layer: ModuleType):
    tensors, rest = layer.example(dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.float16):
        got = values_and_grads(layer.fused, tensors, rest)
    right = values_and_grads(layer.fused, tensors, rest)
    assert all(torch.equal(got[name], x) for name, x in right.items())


def assert_no_sequence_sees_another(layer: ModuleType):
    tensors, rest = layer.example(lengths=(5, 30, 4))
    clean = values_and_grads(layer.fused, tensors, rest)
    tensors["packed"][:, :5], tensors["packed"][:, 35:] = torch.nan, torch.nan
    tensors["tail"][::2], tensors["initial_state"][::2] = torch.nan, torch.nan
    spoilt = values_and_grads(layer.fused, tensors, rest)
    assert spoilt["y"][:, :5].isnan().all()
    for name in ("y", "dpacked"):
        assert torch.equal(clean[name][:, 5:35], spoilt[name][:, 5:35]), name
    for name in ("state", "tail_after", "dinitial_state", "dtail"):
        assert torch.equal(clean[name][1], spoilt[name][1]), name


def assert_fakes_say_what_comes(layer: ModuleType, sizes, ops: set[str]):
    """Of a projection with other strides too."""
    tensors, rest = layer.example(**sizes, dtype=torch.bfloat16)
    tensors["packed"] = tensors["packed"].transpose(0, 1).contiguous().transpose(0, 1)
    with Compared() as compared:
        values_and_grads(layer.fused, tensors, rest)
        values_and_grads(layer.fused, tensors, rest, unused=("state", "tail_after"))
    assert compared.wrong == []
    assert ops <= compared.seen


def assert_checkpointing_changes_nothing(layer: ModuleType):
    tensors, rest = layer.example()

    def again(given, **options):
        return checkpoint(
            lambda *x: layer.fused(dict(zip(layer.TENSORS, x, strict=True)), **options),
            *given.values(),
            use_reentrant=False,
        )

    got, right = (values_and_grads(run, tensors, rest) for run in (again, layer.fused))
    assert all(torch.equal(got[name], x) for name, x in right.items())
