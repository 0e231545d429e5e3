"""What a recurrence is: its name, equation, shapes and paper, and how its arguments map onto a family's call."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor

from .cell import Cell
from .example import Draw, Sizes

Family = Literal["dense", "diagonal", "matrix", "selective"]
Dtype = Literal["input", "float", "state", "bool"]
Finish = Callable[[Tensor, Tensor | None], tuple[Tensor, Any]]


class MatrixCall(NamedTuple):
    """What every matrix recurrence asks of its family, in one form.

    Per head, with S of shape [K, V], decay a_t = exp(g_t) and write strength b_t = beta_t (1 where absent):

        S = a_t S;  S = S + b_t k_t v_t^T                 (additive)
        S = a_t S;  S = S + b_t k_t (v_t - S^T k_t)^T     (delta)
        S = a_t S;  S = S + b_t k_t (v_t - S^T e_t)^T     (delta, with an erase key e)
        o_t = scale * S^T q_t

    With erase_before_decay the erase key reads the state as the step found it: S^T e_t is taken before S = a_t S.

    With stabilizer m, all of this is in units of exp(m_t), a normaliser n = a_t n + b_t k_t rides along as one more
    column of the state, and o_t = scale S^T q_t / (max(|scale n . q_t|, exp(-m_t)) + eps). The gradient of m_t is that
    of a change of unit: state, strengths and exp(-m_t) change with it, so that eps alone makes a difference, and for
    the last m of a sequence the final state, which is returned in units of it: -<S, dS>.
    """

    q: Tensor  # [B, T, Hq, K], H a multiple of Hq
    k: Tensor  # [B, T, Hq, K]
    v: Tensor  # [B, T, H, V]
    g: Tensor | None = None  # natural-log decay: [B, T, H] (scalar) or [B, T, H, K] (vector)
    beta: Tensor | None = None  # [B, T, H]
    stabilizer: Tensor | None = None  # [B, T, H], the natural logarithm of the unit
    initial_state: Tensor | None = None  # [N, H, K, V], or [N, H, K, V + 1] with stabilizer
    e: Tensor | None = None  # erase key of a delta write, [B, T, He, K], H a multiple of He; k where absent
    scale: float = 1.0
    eps: float = 0.0
    delta: bool = False
    erase_before_decay: bool = False  # with e alone


class DiagonalCall(NamedTuple):
    """What every diagonal recurrence asks of its family: h_t = a_t h_{t-1} + x_t, or a_t e^{i theta_t} h_{t-1} + x_t.

    With theta, neighbouring channels (2j, 2j + 1) of x and h are the real and imaginary part of pair j. With log, a
    holds the natural logarithms of the gates; never together with theta.
    """

    a: Tensor  # [B, T, D], or [B, T, D/2] with theta
    x: Tensor  # [B, T, D]
    theta: Tensor | None = None  # [B, T, D/2], radians
    initial_state: Tensor | None = None  # [N, D]
    log: bool = False


class SelectiveCall(NamedTuple):
    """What a selective scan asks of its family. Per channel d of group j, with N numbers of state that nobody shares:

        delta_t = dt_t + dt_bias, and its softplus with softplus
        S_n = exp(delta_t A_n) S_n + delta_t B_tjn x_t
        y_t = (sum_n C_tjn S_n + D x_t) silu(z_t)

    Group j of B and C serves channels j D / G to (j + 1) D / G - 1.
    """

    x: Tensor  # [B, T, D]
    dt: Tensor  # [B, T, D]
    A: Tensor  # [D, N], natural-log decay rates a unit of delta
    B: Tensor  # [B, T, G, N]
    C: Tensor  # [B, T, G, N]
    D: Tensor | None = None  # [D]
    z: Tensor | None = None  # [B, T, D]
    dt_bias: Tensor | None = None  # [D]
    initial_state: Tensor | None = None  # [sequences, D, N]
    softplus: bool = False


class DenseCall(NamedTuple):
    """What every dense recurrence asks of its family: g_t = x_t + R s0_{t-1} + b, s_t = cell(s_{t-1}, g_t).

    S, G, Gi, Gr count the cell's states, gates, input gates and recurrent gates. R^T dg, the gradient that reaches s0
    through R at each step, is clipped elementwise to recurrent_grad_clip, or dropped with cut_recurrent_grad.
    """

    cell: Cell
    x: Tensor  # [B, T, Gi, H, D]
    R: Tensor  # [Gr, H, D, D] (out, in)
    b: Tensor | None = None  # [G, H, D]
    initial_state: Tensor | None = None  # [S, N, H, D]
    reset: Tensor | None = None  # [B, T] bool: the state is zeroed before that step
    recurrent_grad_clip: float | None = None
    cut_recurrent_grad: bool = False


@dataclass(frozen=True, slots=True)
class Argument:
    """One tensor argument: what it is, and what is accepted.

    shapes: the accepted shapes, each the names of its axes ("B T H K"); equal names are equal sizes across arguments.
    note: what it holds, with its unit. dtype: "input" (all such arguments share one floating dtype), "float" (any
    floating dtype), "state" (float32, or float64 with float64 inputs), "bool". required: whether None is refused.
    """

    note: str
    shapes: tuple[str, ...]
    dtype: Dtype = "input"
    required: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.shapes, str):
            object.__setattr__(self, "shapes", (self.shapes,))


@dataclass(frozen=True)
class Recurrence:
    """The definition of one recurrence.

    name: also the op's and the doc page's. title: in words. equation: one step, in plain text. paper: the source.
    arguments: the op's tensor arguments, the first of which carries the input dtype; a tuple stands for a tuple of
    tensors. The ops check against them and the docs print them.
    map: arguments -> (family call, finish); plain differentiable PyTorch. finish turns the family's output and final
    state into the recurrence's, the state only if it is given, and is None where they are the same.
    example: (Draw, Sizes) -> arguments of the scale that a model has; doctor, tests and benchmarks draw from it.
    """

    name: str
    family: Family
    title: str
    equation: str
    paper: str
    arguments: Mapping[str, Argument | tuple[Argument, ...]]
    map: Callable[..., tuple[Any, Finish | None]]
    example: Callable[[Draw, Sizes], dict[str, Any]]
