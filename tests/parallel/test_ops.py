"""Every linear recurrence over ranks equals one process: outputs, states and gradients, however the tokens are cut."""

import pytest
import torch

from holdfast.recurrences import RECURRENCES
from parallel_support.op_cases import Setting, op_equals_one_process

LINEAR = [name for name, recurrence in RECURRENCES.items() if recurrence.family in ("matrix", "diagonal")]

# by the number of ranks; 37 tokens
UNEVEN = {2: (23, 14), 4: (9, 3, 20, 5)}
EMPTY = {2: (0, 11), 4: (6, 0, 0, 5)}
FEWER = {2: (0, 1), 4: (1, 0, 1, 0)}
# sequences that lie within a part, end where one ends, run over one boundary and over all; empty ones at the ends and
# between
PACKED = (0, 0, 4, 9, 9, 34, 37, 37)
EVEN = {2: (12, 8), 4: (4, 10, 2, 6)}


@pytest.mark.parametrize("name", LINEAR)
def test_uneven_parts(ranks, name):
    ranks.run(op_equals_one_process, name, Setting(UNEVEN[ranks.size]), 1e-10, torch.float64)


@pytest.mark.parametrize("name", LINEAR)
def test_packed_sequences_over_boundaries(ranks, name):
    setting = Setting(UNEVEN[ranks.size], bounds=PACKED)
    ranks.run(op_equals_one_process, name, setting, 1e-10, torch.float64)


@pytest.mark.parametrize("name", LINEAR)
def test_zigzag(ranks, name):
    setting = Setting(EVEN[ranks.size], layout="zigzag")
    ranks.run(op_equals_one_process, name, setting, 1e-10, torch.float64)


@pytest.mark.parametrize("name", ["gla", "mlstm", "gated_delta_rule", "rotlru"])
@pytest.mark.parametrize("bounds", [(0, 3, 3, 14, 20), (0, 20), (0, 1, 2, 12, 17, 20, 20)], ids=str)
def test_zigzag_packed(ranks, name, bounds):
    total = sum(EVEN[ranks.size])
    bounds = tuple(min(bound, total) if bound < 20 else total for bound in bounds)
    setting = Setting(EVEN[ranks.size], bounds=bounds, layout="zigzag")
    ranks.run(op_equals_one_process, name, setting, 1e-10, torch.float64)


@pytest.mark.parametrize("name", ["simple_gla", "gla", "mlstm", "delta_rule", "rglru", "rotlru"])
@pytest.mark.parametrize("lengths", [EMPTY, FEWER], ids=["empty parts", "fewer tokens than ranks"])
@pytest.mark.parametrize("packed", [False, True])
def test_parts_without_tokens(ranks, name, lengths, packed):
    parts = lengths[ranks.size]
    bounds = (0, 0, sum(parts) // 2, sum(parts), sum(parts)) if packed else None
    ranks.run(op_equals_one_process, name, Setting(parts, bounds=bounds), 1e-10, torch.float64)


@pytest.mark.parametrize("name", LINEAR)
def test_from_zeros(two_ranks, name):
    two_ranks.run(op_equals_one_process, name, Setting((5, 8), initial=False), 1e-10, torch.float64)
    setting = Setting((5, 8), bounds=(0, 3, 13), initial=False)
    two_ranks.run(op_equals_one_process, name, setting, 1e-10, torch.float64)


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("ssd", Setting((5, 8), vector=True)),
        ("ssd", Setting((5, 8), options=(("dt_softplus", True),))),
        ("simple_gla", Setting((5, 8), options=(("g", None), ("scale", 0.7)), query_heads=4)),
        ("simple_gla", Setting((5, 8), options=(("g", -torch.arange(1.0, 5, dtype=torch.float64) / 9),))),
        ("lightning", Setting((5, 8), options=(("layer", 1), ("num_layers", 3)))),
        ("delta_rule", Setting((5, 8), options=(("qk_l2norm", True), ("beta_sigmoid", True)))),
        (
            "gated_delta_rule",
            Setting(
                (5, 8),
                options=(
                    ("A_log", torch.arange(4, dtype=torch.float64) / 4),
                    ("dt_bias", torch.arange(4, dtype=torch.float64) / 3),
                    ("beta_sigmoid", True),
                    ("allow_neg_eigval", True),
                ),
            ),
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(["vector"] * x.vector + [key for key, _ in x.options]),
)
def test_options(two_ranks, name, setting):
    two_ranks.run(op_equals_one_process, name, setting, 1e-10, torch.float64)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("bounds", [None, (0, 3, 13)])
def test_mlstm_with_sigmoid_gates(two_ranks, normalize, bounds):
    options = (("gating", "sigmoid"), ("normalize", normalize))
    two_ranks.run(
        op_equals_one_process,
        "mlstm",
        Setting((5, 8), bounds=bounds, initial=False, options=options),
        1e-10,
        torch.float64,
    )
