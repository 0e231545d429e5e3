"""Libraries that need a GPU: stand-ins for them, each in its own layout, give what the bench takes for exact."""

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast import ops
from holdfast.cli.bench.case import Case
from holdfast.cli.bench.measure import measure
from holdfast.cli.bench.peers import PEERS, Peer
from holdfast.cli.bench.peers.flashrnn import _describe_gpu
from holdfast.cli.bench.subject import Refused

CPU = torch.device("cpu")
# no two alike, so that an axis in another's place has the wrong size
SEQUENCE = (("B", 2), ("T", 24), ("H", 3), ("K", 8), ("V", 4))
ONE_STEP = (("B", 2), ("T", 1), ("H", 3), ("K", 8), ("V", 4))
CELL = (("B", 2), ("T", 24), ("H", 3), ("D", 8))


def siging_chunkwise(q, k, v, i, f, chunk_size, autocast_kernel_dtype):
    """[B, H, T, ...], in whole chunks."""
    assert q.shape[2] % chunk_size == 0
    swapped = (x.transpose(1, 2) for x in (q, k, v, i, f))
    return ops.mlstm(*swapped, gating="sigmoid")[0].transpose(1, 2)


def chunk_scan_combined(x, dt, A, B, C, chunk_size):
    return ops.ssd(x, dt, A, B, C)[0]


def selective_state_update(state, x, dt, A, B, C, D, dt_bias):
    """state [B, H, V, K], in place; x, dt, dt_bias and D [(B,) H, V], A [H, V, K], B and C a group, [B, Hq, K]."""
    dt = (dt + dt_bias)[..., None]
    B, C = (each.repeat_interleave(state.shape[1] // each.shape[1], 1)[:, :, None] for each in (B, C))
    state.mul_((dt * A).exp()).add_(dt * B * x[..., None])
    return (state * C).sum(-1) + D * x


def state_passing(states, decay):
    """states [B, G, H, K V], log decay [B, H, G] -> the states before each chunk, and the last."""
    state, before = torch.zeros_like(states[:, 0]), []
    for chunk in range(states.shape[1]):
        before.append(state)
        state = decay[:, :, chunk, None].exp() * state + states[:, chunk]
    return torch.stack(before, 1), state


def scan(gates, tokens):
    """[B, D, T]."""
    h, out = torch.zeros_like(tokens[..., 0]), []
    for a, x in zip(gates.unbind(2), tokens.unbind(2), strict=True):
        h = a * h + x
        out.append(h)
    return torch.stack(out, 2)


def flashrnn(x, R, b, function, backend, dtype):
    """States and last states, each with h first."""
    out, last = getattr(ops, function)(x, R, b, output_final_state=True)
    # what stands for the other states is nothing that would pass for h
    return torch.stack([out, torch.zeros_like(out)]), last


def fla(op: str, **renamed: str):
    """Takes what it does not know in silence; so what it knows has to be all that came."""

    def function(output_final_state=False, **given: Tensor) -> Any:
        given = {renamed.get(name, name): x for name, x in given.items()}
        return getattr(ops, op)(**given, output_final_state=output_final_state)

    return function


LIBRARIES: dict[str, dict[str, Any]] = {
    "mlstm_kernels.torch.chunkwise.triton_xl_chunk_siging": {"mlstm_siging_chunkwise__xl_chunk": siging_chunkwise},
    "mamba_ssm.ops.triton.ssd_combined": {"mamba_chunk_scan_combined": chunk_scan_combined},
    "mamba_ssm.ops.triton.selective_state_update": {"selective_state_update": selective_state_update},
    "mamba_ssm.ops.triton.ssd_state_passing": {"_state_passing_fwd": state_passing},
    "accelerated_scan.warp": {"scan": scan},
    "accelerated_scan.scalar": {"scan": scan},
    "flashrnn.flashrnn.flashrnn": {"flashrnn": flashrnn},
    "fla.utils": {"TRITON_ABOVE_3_7_1": False},
    "fla.ops.common.chunk_o": {},
    "fla.ops.gla": {"chunk_gla": fla("gla"), "fused_recurrent_gla": fla("gla", gk="g", g="per head")},
    "fla.ops.hgrn": {"fused_recurrent_hgrn": fla("hgrn")},
}


def peer_by_stand_in(name: str, monkeypatch: pytest.MonkeyPatch) -> Peer:
    for module, names in LIBRARIES.items():
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(**names))
    return replace(next(peer for peer in PEERS if peer.name == name), needs_gpu=False)


@pytest.mark.parametrize(
    ("name", "case"),
    [
        (
            "mlstm_kernels xl_chunk",
            Case("mlstm", (*SEQUENCE[:1], ("T", 128), *SEQUENCE[2:]), options=(("gating", "sigmoid"),)),
        ),
        ("mamba_ssm ssd", Case("ssd", SEQUENCE)),
        ("mamba_ssm state update", Case("ssd", (*ONE_STEP, ("Hq", 1)), state=True)),
        ("mamba_ssm state passing", Case("inter_chunk_scan", (("B", 2), ("G", 5), *SEQUENCE[2:]))),
        ("flashrnn cuda_fused", Case("lstm", CELL)),
        ("accelerated-scan warp", Case("rglru", (("B", 2), ("T", 32), ("D", 6)))),
        ("accelerated-scan scalar", Case("hgrn", (("B", 2), ("T", 24), ("D", 6)))),
        ("fla chunk", Case("gla", SEQUENCE)),
        ("fla fused_recurrent", Case("gla", ONE_STEP, state=True)),
        ("fla fused_recurrent", Case("hgrn", (("B", 2), ("T", 24), ("D", 6)))),
    ],
    ids=str,
)
def test_a_gpu_peer_is_called_in_its_own_layout(name, case, roof, monkeypatch):
    # in float64 nothing of Triton's is set, and a stand-in is right to the last digits
    row = measure(replace(case, dtype="float64"), peer_by_stand_in(name, monkeypatch), CPU, roof)
    assert (row.status, row.detail) == ("ok", "")


@pytest.mark.parametrize("op", ["rglru", "hgrn"])
def test_a_scan_of_decays_gets_no_logarithms(op, monkeypatch):
    """Its own exact result is of what it is given, and would not show them."""
    case = Case(op, (("B", 2), ("T", 24), ("D", 6)), "float64")
    subject = peer_by_stand_in("accelerated-scan scalar", monkeypatch).prepare(case, CPU)
    exact = case.work.exact(case.arguments(CPU), {})
    torch.testing.assert_close(subject.call(subject.inputs).mT, exact, atol=1e-12, rtol=1e-12)


# of each flag the peers that have it: what compiles in child processes, and what is asked of whom, follows from them
FLAGGED = {
    "needs_gpu": {
        "fla chunk", "fla fused_recurrent", "mlstm_kernels xl_chunk", "mamba_ssm ssd", "mamba_ssm state update",
        "mamba_ssm selective_scan", "mamba_ssm state passing", "flashrnn cuda_fused", "flashrnn alternating",
        "flashrnn triton_fused", "accelerated-scan warp", "accelerated-scan scalar",
    },
    "extension": {"flashrnn cuda_fused", "flashrnn alternating", "accelerated-scan warp"},
    "per_size": {
        "fla chunk", "fla fused_recurrent", "mamba_ssm ssd", "flashrnn cuda_fused", "flashrnn alternating",
        "flashrnn triton_fused",
    },
    "decodes": {"fla chunk", "fla fused_recurrent", "mamba_ssm state update", "torch.compile of the loop"},
}  # fmt: skip
LIBRARIES_ALONE = {"mamba_ssm selective_scan", "torch.nn", "torch SDPA", "torch separate kernels"}


@pytest.mark.parametrize("flag", FLAGGED)
def test_what_is_known_of_a_peer_without_its_file(flag):
    assert {peer.name for peer in PEERS if getattr(peer, flag)} == FLAGGED[flag]
    assert {peer.name for peer in PEERS if not peer.compiles} == LIBRARIES_ALONE


def test_a_peers_state_is_asked_for_where_it_takes_one_alone():
    case = Case("gla", ONE_STEP, state=True)
    told = {peer.name: peer.refusal(case, CPU) for peer in PEERS if not peer.needs_gpu}
    assert {name for name, said in told.items() if not said} == {"torch.compile of the loop"}


@pytest.mark.parametrize("length", [16, 24, 31, 33, 131072])
def test_the_scan_in_cuda_takes_powers_of_two(length, monkeypatch):
    peer = peer_by_stand_in("accelerated-scan warp", monkeypatch)
    with pytest.raises(Refused, match="needs T a power of two, 32 to 65536"):
        peer.prepare(Case("rglru", (("B", 1), ("T", length), ("D", 1))), CPU)
    assert peer_by_stand_in("accelerated-scan scalar", monkeypatch).prepare(
        Case("rglru", (("B", 1), ("T", length), ("D", 1))), CPU
    )


@pytest.mark.parametrize("length", [32, 64, 65536])
def test_the_lengths_of_the_scan_in_cuda(length, monkeypatch):
    case = Case("rglru", (("B", 1), ("T", length), ("D", 1)), "bfloat16")
    subject = peer_by_stand_in("accelerated-scan warp", monkeypatch).prepare(case, CPU)
    assert subject.note == "takes the decay in the inputs' dtype, not in float32"


@pytest.mark.parametrize(("kind", "longest"), [("cuda", 64), ("cpu", 8), ("mps", 8)])
def test_the_compiled_loop_is_no_longer_than_its_compilation_is_worth(kind, longest, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.setattr(torch.compiler, "reset", lambda: None)
    peer = next(peer for peer in PEERS if peer.name == "torch.compile of the loop")
    scan = (("B", 1), ("H", 1), ("K", 4), ("V", 4), ("G", longest + 1))
    for case in (Case("rglru", (("B", 1), ("T", longest + 1), ("D", 4))), Case("inter_chunk_scan", scan)):
        with pytest.raises(Refused, match=f"measured up to {longest} steps only"):
            peer.prepare(case, SimpleNamespace(type=kind))
    assert peer.prepare(Case("rglru", (("B", 1), ("T", 8), ("D", 4))), CPU).shared


def test_what_a_peer_is_told_of_and_says(monkeypatch):
    """Where the exact result is the op's own of the same inputs, one serves all runners of a case."""

    def prepared(name, op, sizes, **more):
        return peer_by_stand_in(name, monkeypatch).prepare(Case(op, sizes, "float64", **more), CPU)

    ssd = prepared("mamba_ssm ssd", "ssd", SEQUENCE)
    assert (ssd.note, ssd.shared) == ("chunks of 256", True)
    assert prepared("flashrnn cuda_fused", "lstm", CELL).shared
    gla = prepared("fla chunk", "gla", SEQUENCE)
    assert (gla.note, gla.shared) == ("its own refusal of this Triton is off", True)
    assert sys.modules["fla.utils"].TRITON_ABOVE_3_7_1 is True
    assert not prepared("accelerated-scan scalar", "rglru", (("B", 2), ("T", 24), ("D", 6))).shared
    whole = (("B", 1), ("T", 32), ("H", 1), ("K", 4), ("V", 4), ("C", 16))
    assert prepared("torch separate kernels", "intra_chunk", whole).shared
    with pytest.raises(Refused, match="needs T in whole chunks"):
        prepared("torch separate kernels", "intra_chunk", (*whole[:1], ("T", 40), *whole[2:]))
    for passes, state in (("fwd", False), ("fwd+bwd", True)):
        with pytest.raises(Refused, match="is one step of decoding"):
            prepared("mamba_ssm state update", "ssd", ONE_STEP, passes=passes, state=state)
    with pytest.raises(Refused, match="is one step of decoding"):
        prepared("mamba_ssm state update", "ssd", SEQUENCE, state=True)


def test_flashrnn_is_told_of_the_gpu(monkeypatch):
    gpu = {"regs_per_multiprocessor": 65536, "multi_processor_count": 132, "shared_memory_per_block_optin": 232448}
    asked = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda n: asked.append(n) or SimpleNamespace(**gpu))
    assert [*_describe_gpu().values()] == [1024, *gpu.values()]
    assert asked == [0]
