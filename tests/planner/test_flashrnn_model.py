"""FlashRNN's kernel as integer constraints: against CP-SAT, against arithmetic, and against the paper's limits."""

import itertools

import pytest

from holdfast.planner import Device
from holdfast.planner.constrint import Infeasible, Model
from planner import flashrnn_limits
from planner.flashrnn_model import Kernel, backward, forward

REASON = "OR-Tools, the solver's oracle, is a development dependency"
KERNELS = [
    Kernel(64, batch=16, heads=12),
    Kernel(768, batch=16),
    Kernel(768, batch=64),
    Kernel(1312),
    Kernel(1600),
    Kernel(1824, may_spill=True),
    Kernel(2432, may_spill=True),
    Kernel(2688, reserve=16),
    Kernel(2720, may_spill=True),
]


def feasible(model: Model) -> bool:
    try:
        model.first()
    except Infeasible:
        return False
    return True


@pytest.mark.parametrize("direction", [forward, backward])
def test_feasibility_by_cp_sat(direction) -> None:
    pytest.importorskip("ortools", reason=REASON)
    from planner import cpsat

    answers = []
    for kernel, name in itertools.product(KERNELS, ("rtx3090", "h100")):
        model = direction(Device.named(name), kernel)
        answers.append(feasible(model))
        assert answers[-1] == cpsat.is_feasible(model), (kernel, name)
    assert True in answers
    assert False in answers


@pytest.mark.parametrize("direction", [forward, backward])
def test_all_solutions_by_cp_sat(direction) -> None:
    pytest.importorskip("ortools", reason=REASON)
    from planner import cpsat

    model = direction(Device.named("a40"), Kernel(80, batch=16, heads=3))
    found = [tuple(solution.values()) for solution in model.solutions()]
    assert len(found) == len(set(found))
    assert len(found) > 100
    assert set(found) == cpsat.all_solutions(model)


@pytest.mark.parametrize("direction", [forward, backward])
def test_optimum_by_cp_sat(direction) -> None:
    pytest.importorskip("ortools", reason=REASON)
    from planner import cpsat

    model = direction(Device.named("h100"), Kernel(768, batch=16))
    named = {variable.name: variable for variable in model.variables}
    goal = 100 * named["L_S"] * named["L_G"] * named["L_B"] + 7 * named["B_S"] * named["B_G"] + named["W_S"]
    assert model.best(goal)[goal] == cpsat.optimum(model, goal, minimize=True)


def test_a_solution_keeps_every_limit() -> None:
    """The same limits, worked out from the numbers of one solution and in other units."""
    device = Device.named("h100")
    for kernel in (Kernel(768, batch=16), Kernel(2688)):
        v = forward(device, kernel).first()
        batch = -(-kernel.batch // 8) * 8
        assert v["E_B"] * v["W_B"] * v["B_B"] * v["L_B"] == batch
        assert v["E_S"] * v["W_S"] * v["B_S"] * v["L_S"] == kernel.head_dim
        assert v["E_G"] * v["W_G"] * v["B_G"] * v["L_G"] == 4 * kernel.head_dim
        warps = v["W_B"] * v["W_S"] * v["W_G"]
        assert warps * 32 <= 256
        assert v["B_B"] * v["B_S"] * v["B_G"] * v["B_H"] <= 132
        held = (v["E_S"] * v["W_S"]) * (v["E_G"] * v["W_G"] * v["L_G"]) * v["L_S_reg"]
        # bf16 pairs share a 32-bit register; each group of warps along the batch has a copy.
        assert held * v["W_B"] / 2 / (warps * 32) + v["E_B"] * v["E_G"] / 32 < 255
        shared = 2 * (v["E_S"] * v["W_S"] * v["L_S_sram"]) * (v["E_G"] * v["W_G"] * v["L_G"])
        assert shared <= 227 * 1024
        assert (2 * held + shared) * v["B_S"] * v["B_G"] == 2 * 4 * kernel.head_dim**2


def test_a_head_too_large_is_explained() -> None:
    with pytest.raises(Infeasible) as caught:
        forward(Device.named("h100"), Kernel(4096)).first()
    assert "shared memory of a block" in str(caught.value)
    assert "all blocks run at once" in str(caught.value)
    assert "heads are shared out evenly" not in str(caught.value)


def test_limits_beside_the_paper() -> None:
    for name, paper in flashrnn_limits.PAPER.items():
        found = flashrnn_limits.fitting(Device.named(name), may_spill=True)
        assert set(paper) <= set(found)
        assert max(paper) == max(found)
        assert len(found) <= len(paper) + 3


def test_the_page_is_what_the_command_writes() -> None:
    assert flashrnn_limits.PAGE.read_text(encoding="utf-8") == flashrnn_limits.page()
