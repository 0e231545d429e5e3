"""The PyTorch backends on an NVIDIA GPU: the same answers, under CUDA graphs and autocast too."""

from dataclasses import replace

import pytest
import torch

import holdfast
from holdfast.kernels.backend import describe
from holdfast.ops.verify import verify
from holdfast.planner import Device
from holdfast.recurrences import RECURRENCES, Draw, Sizes
from parity import leaves

pytestmark = pytest.mark.gpu
every_op = pytest.mark.parametrize("name", RECURRENCES)


def test_every_backend_is_right():
    verdicts = list(verify(torch.device("cuda")))
    assert {v.op for v in verdicts} >= set(RECURRENCES)
    assert [v for v in verdicts if v.status == "wrong"] == []


def test_the_card_is_described_by_its_driver():
    card, here = torch.cuda.get_device_properties(0), describe(torch.device("cuda", 0))
    assert (here.kind, here.name, here.capability) == ("cuda", card.name, (card.major, card.minor))
    assert here.sms == card.multi_processor_count
    known = Device.recognised(card.name)
    if known is not None:
        # the table has to be right about the cards that it names
        assert replace(here, name=known.name) == known


@every_op
def test_a_replayed_graph_computes_what_the_call_does(name):
    def example(seed):
        return RECURRENCES[name].example(Draw(seed, device="cuda"), Sizes(T=130, H=2, D=16))

    def step(arguments):
        for x in leaves(arguments):
            x.grad = None
        o, state = getattr(holdfast, name)(**arguments, output_final_state=True)
        sum(x.square().sum() for x in leaves([o, state])).backward()
        return [*leaves([o, state]), *(x.grad for x in leaves(arguments))]

    # reset decides which rows are zeroed, not which operations run, but it is no floating-point leaf to copy into
    static = {key: value for key, value in example(0).items() if key != "reset"}
    for x in leaves(static):
        x.requires_grad_()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step(static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(static)
    fresh = {key: value for key, value in example(1).items() if key != "reset"}
    with torch.no_grad():
        for x, y in zip(leaves(static), leaves(fresh), strict=True):
            x.copy_(y)
    graph.replay()
    for x in leaves(fresh):
        x.requires_grad_()
    for x, y in zip(captured, step(fresh), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


@every_op
def test_autocast(name):
    arguments = RECURRENCES[name].example(Draw(device="cuda"), Sizes())
    with torch.autocast("cuda", dtype=torch.bfloat16):
        o, state = getattr(holdfast, name)(**arguments, output_final_state=True)
    assert o.dtype == torch.bfloat16
    assert all(x.dtype == torch.float32 for x in leaves(state))
    wide, _ = getattr(holdfast, name)(**arguments)
    assert (o.float() - wide).norm() <= 2e-2 * wide.norm()


@every_op
def test_compiles_as_one_graph(name):
    arguments = RECURRENCES[name].example(Draw(device="cuda"), Sizes(T=9))
    torch._dynamo.reset()
    compiled = torch.compile(getattr(holdfast, name), fullgraph=True)
    o, _ = compiled(**arguments)
    expected, _ = getattr(holdfast, name)(**arguments)
    torch.testing.assert_close(o, expected, rtol=1e-5, atol=1e-6)
