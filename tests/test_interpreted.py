"""Children that interpret Triton's kernels: what is told of them, and that the shortcuts change no number."""

import pytest
import torch

from interpreted import interpret

# of the process that imported this file
SEEN = []


def fails(value):
    print("said before")
    assert value == 2


def waits():
    import time

    time.sleep(60)


def ends():
    import os

    os._exit(3)


def counts():
    SEEN.append(1)
    print(len(SEEN))


def same_bits():
    """The gradients of a recurrence in bfloat16, by the interpreter as Triton has it and with the shortcuts."""
    import interpreter_shortcuts
    from holdfast.kernels.matrix.scalar_decay.triton.backend import TritonSinglePass
    from kernels.matrix.scalar_decay.triton.parity import example, plan, run

    call = example(T=21, H=2, Hq=1, dtype=torch.bfloat16, norm=True)
    cotangents = torch.ones_like(call.v), torch.ones_like(call.initial_state)
    found = []
    for take in (lambda: None, interpreter_shortcuts.take):
        take()
        found.append(run(TritonSinglePass(), (plan(), plan()), call, None, cotangents))
    assert all(torch.equal(x, found[1][name]) for name, x in found[0].items())
    print(*found[0])


def test_a_failure_is_told_with_what_was_printed():
    with pytest.raises(AssertionError, match=r"said before(.|\n)*assert value == 2"):
        interpret("test_interpreted", "fails", 3)
    interpret("test_interpreted", "fails", 2)


@pytest.mark.parametrize(("function", "status"), [("waits", "-14"), ("ends", "3")])
def test_a_child_that_ends_otherwise_has_failed(function, status):
    with pytest.raises(AssertionError, match=f"ended with {status}"):
        interpret("test_interpreted", function, seconds=1)


def test_children_see_nothing_of_one_another():
    assert [interpret("test_interpreted", "counts") for _ in range(2)] == ["1\n", "1\n"]


@pytest.mark.slow
def test_shortcuts_change_no_number():
    assert "dstate" in interpret("test_interpreted", "same_bits", shortcuts=False)
