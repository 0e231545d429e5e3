"""Other implementations, one small file each. A file is imported when its peer is measured, not before."""

from collections.abc import Collection
from dataclasses import dataclass
from importlib import import_module

import torch

from ..case import Case
from ..subject import Refused, Subject

SEQUENCE = ("simple_gla", "linear_attention", "gla", "delta_rule", "gated_delta_rule", "mlstm")


@dataclass(frozen=True)
class Peer:
    """A peer by name: the file of this folder that prepares it, what to ask of that file, and the ops it knows.

    ops: empty for all. needs_gpu: whether it runs on NVIDIA GPUs only.
    """

    name: str
    file: str
    variant: str = ""
    ops: tuple[str, ...] = ()
    needs_gpu: bool = True

    def prepare(self, case: Case, device: torch.device) -> Subject:
        """Raises Refused with the reason for a case that it cannot run, ImportError where it is not installed."""
        if self.needs_gpu and device.type != "cuda":
            raise Refused("needs an NVIDIA GPU")
        return import_module(f"{__name__}.{self.file}").prepare(case, device, self.variant)


PEERS = (
    Peer("fla chunk", "fla", "chunk", ("simple_gla", "gla", "delta_rule", "gated_delta_rule", "hgrn")),
    Peer("fla fused_recurrent", "fla", "fused_recurrent", ("hgrn",)),
    Peer("mlstm_kernels xl_chunk", "mlstm_kernels", ops=("mlstm",)),
    Peer("mamba_ssm ssd", "mamba_ssm", "ssd", ("ssd",)),
    Peer("mamba_ssm state passing", "mamba_ssm", "state_passing", ("inter_chunk_scan",)),
    Peer("flashrnn cuda_fused", "flashrnn", "cuda_fused", ("lstm", "slstm", "elman")),
    Peer("flashrnn alternating", "flashrnn", "cuda", ("lstm", "slstm", "elman")),
    Peer("flashrnn triton_fused", "flashrnn", "triton_fused", ("lstm", "slstm", "elman")),
    Peer("accelerated-scan warp", "accelerated_scan", "warp", ("rglru", "hgrn")),
    Peer("accelerated-scan scalar", "accelerated_scan", "scalar", ("rglru", "hgrn")),
    Peer("torch.nn", "torch_nn", ops=("lstm", "gru", "elman"), needs_gpu=False),
    Peer("torch SDPA", "attention", ops=SEQUENCE, needs_gpu=False),
    Peer("torch separate kernels", "separate", ops=("intra_chunk",), needs_gpu=False),
    Peer("torch.compile of the loop", "compiled_loop", needs_gpu=False),
)


def peers_of(op: str, among: Collection[str] | None = None) -> list[Peer]:
    """The peers that know an op; among: only those of these names."""
    known = [peer for peer in PEERS if not peer.ops or op in peer.ops]
    return known if among is None else [peer for peer in known if peer.name in among]
