"""The scans under test: their functions, their oracle, arguments of the scale that a model has."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import mlx.core as mx

import holdfast.mlx as hm
from holdfast.mlx import Scan

from . import oracle

normal, uniform = mx.random.normal, mx.random.uniform


@dataclass(frozen=True)
class Case:
    """One scan at one size: inputs, initial state and a weight for each value in the loss."""

    name: str
    scan: Callable
    step: Callable
    reference: Callable
    exact: Callable
    inputs: list[mx.array]
    state: mx.array
    y_shape: tuple[int, ...]
    constants: int = 0
    kernels: str = ""

    @property
    def definition(self) -> Scan:
        return DEFINITIONS[self.name]

    @property
    def launched(self) -> list[str]:
        """Names of the forward kernel and of the backward one."""
        return [f"{self.kernels or self.name}_{way}" for way in ("forward", "backward")]

    @property
    def weights(self) -> list[mx.array]:
        keys = mx.random.split(mx.random.key(7))
        return [normal(self.y_shape, key=keys[0]), normal(self.state.shape, key=keys[1])]

    def cast(self, dtype) -> "Case":
        return replace(self, inputs=[x.astype(dtype) for x in self.inputs])

    def tokens(self, part: slice) -> list[mx.array]:
        moving = len(self.inputs) - self.constants
        return [x[:, part] for x in self.inputs[:moving]] + self.inputs[moving:]

    def run(self, **options):
        return oracle.ours(
            lambda *xs, initial_state: self.scan(*xs, initial_state=initial_state, **options),
            self.inputs,
            self.state,
            self.weights,
        )

    def oracle(self):
        return oracle.exact(self.exact, self.inputs, self.state, self.weights)


def rglru(B=2, L=37, D=45):
    a, x = uniform(-1.1, 1.1, (B, L, D)), normal((B, L, D))
    functions = (hm.rglru_scan_with_state, hm.rglru_step, hm.rglru_scan_reference, oracle.rglru)
    return Case("rglru", *functions, [a, x], normal((B, D)), (B, L, D))


def rotlru(B=2, L=37, P=19):
    a, theta, x = uniform(-1, 1, (B, L, P)), uniform(-3, 3, (B, L, P)), normal((B, L, 2 * P))
    functions = (hm.rotlru_scan_with_state, hm.rotlru_step, hm.rotlru_scan_reference, oracle.rotlru)
    return Case("rotlru", *functions, [a, mx.cos(theta), mx.sin(theta), x], normal((B, 2 * P)), (B, L, 2 * P))


def gla(B=2, L=37, H=2, K=5, V=7, vector=False):
    q, k, v = normal((B, L, H, K)), normal((B, L, H, K)), normal((B, L, H, V))
    gates = uniform(-1, 1, (B, L, H, K) if vector else (B, L, H))
    functions = (hm.gla_scan_with_state, hm.gla_step, hm.gla_scan_reference, oracle.gla)
    return Case("gla", *functions, [q, k, v, gates], normal((B, H, K, V)), (B, L, H, V))


def ssd(B=2, L=37, H=4, G=2, P=7, N=5):
    u, delta = normal((B, L, H, P)), uniform(0.01, 1, (B, L, H))
    B_in, C_in, A = normal((B, L, G, N)), normal((B, L, G, N)), -mx.exp(normal((H, N)))
    functions = (hm.ssd_scan_with_state, hm.ssd_step, hm.ssd_scan_reference, oracle.ssd)
    return Case("ssd", *functions, [u, delta, B_in, C_in, A], normal((B, H, P, N)), (B, L, H, P), constants=1)


def delta_inputs(B, L, H, G, K, V, gates):
    """Keys of length one, as in models: others make a state that grows without bound."""
    q, k, v = normal((B, L, G, K)), normal((B, L, G, K)), normal((B, L, H, V))
    k = k / mx.linalg.norm(k, axis=-1, keepdims=True)
    return [q, k, v, gates, uniform(0, 2, (B, L, H))]


def gated_delta(B=2, L=37, H=4, G=2, K=5, V=7):
    inputs = delta_inputs(B, L, H, G, K, V, uniform(-1, 1, (B, L, H)))
    functions = (hm.gated_delta_scan_with_state, hm.gated_delta_step, hm.gated_delta_scan_reference, oracle.delta)
    return Case("gated_delta", *functions, inputs, normal((B, H, K, V)), (B, L, H, V), kernels="delta")


def kda(B=2, L=37, H=2, G=2, K=5, V=7):
    inputs = delta_inputs(B, L, H, G, K, V, uniform(-1, 1, (B, L, H, K)))
    functions = (hm.kda_scan_with_state, hm.kda_step, hm.kda_scan_reference, oracle.delta)
    return Case("kda", *functions, inputs, normal((B, H, K, V)), (B, L, H, V), kernels="delta")


SCANS = {"rglru": rglru, "rotlru": rotlru, "gla": gla, "ssd": ssd, "gated_delta": gated_delta, "kda": kda}
DEFINITIONS = {
    "rglru": hm.rglru.SCAN,
    "rotlru": hm.rotlru.SCAN,
    "gla": hm.gla.SCAN,
    "ssd": hm.ssd.SCAN,
    "gated_delta": hm.delta.GATED_DELTA,
    "kda": hm.delta.KDA,
}
# sizes that leave remainders everywhere, of every shape of tile: one lane of rows, 16, more than 16, several blocks
SIZES = {
    "rglru": [{}, {"B": 1, "L": 1, "D": 1}, {"L": 8, "D": 32}],
    "rotlru": [{}, {"B": 1, "L": 1, "P": 1}, {"L": 4, "P": 32}],
    "gla": [
        {},
        {"vector": True},
        {"B": 1, "L": 1, "H": 1, "K": 1, "V": 1},
        {"B": 1, "L": 33, "H": 1, "K": 64, "V": 64, "vector": True},
        {"B": 1, "L": 11, "H": 2, "K": 37, "V": 70},
        {"B": 1, "L": 9, "H": 1, "K": 130, "V": 33, "vector": True},
    ],
    "ssd": [
        {},
        {"B": 1, "L": 1, "H": 1, "G": 1, "P": 1, "N": 1},
        {"B": 1, "L": 33, "H": 2, "G": 2, "P": 64, "N": 16},
        {"B": 1, "L": 11, "H": 2, "G": 1, "P": 70, "N": 37},
    ],
    "gated_delta": [
        {},
        {"B": 1, "L": 1, "H": 1, "G": 1, "K": 1, "V": 1},
        {"B": 1, "L": 33, "H": 1, "G": 1, "K": 64, "V": 64},
        {"B": 1, "L": 11, "H": 2, "G": 1, "K": 37, "V": 70},
    ],
    "kda": [
        {},
        {"B": 1, "L": 33, "H": 1, "G": 1, "K": 64, "V": 64},
        {"B": 1, "L": 9, "H": 2, "G": 1, "K": 130, "V": 33},
    ],
}


def label(sizes) -> str:
    return "-".join(f"{k}{v}" for k, v in sizes.items()) or "ragged"
