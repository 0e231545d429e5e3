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
