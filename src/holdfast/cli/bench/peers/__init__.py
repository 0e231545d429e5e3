"""Other implementations, one small file each. A file is imported when its peer is measured, not before."""

from collections.abc import Collection
from dataclasses import dataclass
from importlib import import_module

import torch

from ..case import Case
from ..subject import Refused, Subject

SEQUENCE = ("simple_gla", "linear_attention", "gla", "delta_rule", "gated_delta_rule", "kda", "mlstm")


@dataclass(frozen=True)
class Peer:
    """A peer by name: the file of this folder that prepares it, what to ask of that file, and the ops it knows.

    ops: empty for all. needs_gpu: whether it runs on NVIDIA GPUs only. extension: whether it builds one of PyTorch's
    C++ extensions. per_size: whether it compiles, or searches, anew for other sizes. decodes: whether it takes a state.
    compiles: whether its first call is more than the loading of a library.
    """

    name: str
    file: str
    variant: str = ""
    ops: tuple[str, ...] = ()
    needs_gpu: bool = True
    extension: bool = False
    per_size: bool = False
    decodes: bool = False
    compiles: bool = True

    def refusal(self, case: Case, device: torch.device) -> str:
        """Why it cannot run a case, as far as that can be told without its file."""
        if self.needs_gpu and device.type != "cuda":
            return "needs an NVIDIA GPU"
        if case.state and not self.decodes:
            return "is not set up here with a state that goes in and out"
        return ""

    def prepare(self, case: Case, device: torch.device) -> Subject:
        """Raises Refused with the reason for a case that it cannot run, ImportError where it is not installed."""
        if reason := self.refusal(case, device):
            raise Refused(reason)
        return import_module(f"{__name__}.{self.file}").prepare(case, device, self.variant)


_FLA = ("simple_gla", "gla", "delta_rule", "gated_delta_rule", "kda", "gdn2", "comba", "rwkv7", "hgrn")
_CELLS = ("lstm", "slstm", "elman")

PEERS = (
    Peer("fla chunk", "fla", "chunk", _FLA, per_size=True, decodes=True),
    Peer("fla fused_recurrent", "fla", "fused_recurrent", _FLA, per_size=True, decodes=True),
    Peer("mlstm_kernels xl_chunk", "mlstm_kernels", ops=("mlstm",)),
    Peer("mamba_ssm ssd", "mamba_ssm", "ssd", ("ssd",), per_size=True),
    Peer("mamba_ssm state update", "mamba_ssm", "state_update", ("ssd",), decodes=True),
    Peer("mamba_ssm selective_scan", "mamba_ssm", "selective_scan", ("mamba1",), compiles=False),
    Peer("mamba_ssm state passing", "mamba_ssm", "state_passing", ("inter_chunk_scan",)),
    Peer("flashrnn cuda_fused", "flashrnn", "cuda_fused", _CELLS, extension=True, per_size=True),
    Peer("flashrnn alternating", "flashrnn", "cuda", _CELLS, extension=True, per_size=True),
    Peer("flashrnn triton_fused", "flashrnn", "triton_fused", _CELLS, per_size=True),
    Peer("accelerated-scan warp", "accelerated_scan", "warp", ("rglru", "hgrn"), extension=True),
    Peer("accelerated-scan scalar", "accelerated_scan", "scalar", ("rglru", "hgrn")),
    Peer("torch.nn", "torch_nn", ops=("lstm", "gru", "elman"), needs_gpu=False, compiles=False),
    Peer("torch SDPA", "attention", ops=SEQUENCE, needs_gpu=False, compiles=False),
    Peer("torch separate kernels", "separate", ops=("intra_chunk",), needs_gpu=False, compiles=False),
    Peer("torch.compile of the loop", "compiled_loop", needs_gpu=False, decodes=True),
)


def peers_of(op: str, among: Collection[str] | None = None) -> list[Peer]:
    """The peers that know an op; among: only those of these names."""
    known = [peer for peer in PEERS if not peer.ops or op in peer.ops]
    return known if among is None else [peer for peer in known if peer.name in among]
