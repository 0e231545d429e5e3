"""Calls that are wrong: each has to be refused before anything is launched, by an error that names the argument."""

from collections.abc import Callable
from typing import Any

import torch

from holdfast.kernels.backend import Rejected

from .blame import is_ours
from .case import Case, Fault
from .judge import Result
from .scenario import Scenario
from .source import Source
from .subjects import SUBJECTS, call_with

Wrong = tuple[dict[str, Any], str]


def misuse(s: Scenario) -> list[Result]:
    """One argument of a good call made wrong."""
    case, source = Case(s), Source(s.seed)
    name = source.choose([name for name in case.tensors if name not in ("C", "n", "m")])
    x = case.tensors[name]
    given: dict[str, Any] = {"cu_seqlens": case.cu} if case.cu is not None else {}
    family = SUBJECTS[s.op].family
    ways: dict[str, Callable[[], Wrong]] = {
        "integers": lambda: ({name: torch.zeros(x.shape, dtype=torch.int64, device=x.device)}, name),
        "complex numbers": lambda: ({name: torch.zeros(x.shape, dtype=torch.complex64, device=x.device)}, name),
        "one axis more": lambda: ({name: x[None]}, name),
        "a number": lambda: ({name: 1.0}, name),
        "a list": lambda: ({name: x.tolist()}, name),
        "an array": lambda: ({name: x.detach().cpu().double().numpy()}, name),
        "no memory": lambda: ({name: x.detach().to("meta")}, name),
        "an unknown backend": lambda: ({"backend": "fastest"}, "backend"),
    }
    # an axis that no other argument has may be of any size
    alone = name in ("v", "o", "states") or (s.op, name) == ("ssd", "x")
    alone = alone and not s.state and not {"gate", "weight", "states"} & (case.tensors.keys() - {name})
    if not alone and name not in ("g", "A", "D", "weight", "a", "theta", "dt", "dt_bias", "A_log"):
        ways["a wider last axis"] = lambda: ({name: torch.cat([x, x, x], -1)}, "")
    if family in ("matrix", "diagonal", "selective", "dense", "inter", "conv"):
        # of as many sequences as there are states
        past = [*(s.cu or (0, 0))[:-1], s.T + 3]
        ways |= {
            "offsets of floats": lambda: ({"cu_seqlens": torch.tensor([0.0, s.T], device=x.device)}, "cu_seqlens"),
            "offsets past the end": lambda: ({"cu_seqlens": torch.tensor(past, device=x.device)}, "cu_seqlens"),
            "offsets in a list": lambda: ({"cu_seqlens": [0, s.T]}, "cu_seqlens"),
        }
        if s.state and s.op != "mlstm":
            ways["a state in float16"] = lambda: (
                {"initial_state": case.tensors["initial_state"].detach().half()},
                "initial_state",
            )
    if family == "matrix" and s.op != "ssd":
        ways["a scale in words"] = lambda: ({"scale": "big"}, "scale")
    if "AN" in s.options:
        ways["a wider A"] = lambda: ({"A": torch.cat([case.tensors["A"]] * 3, -1)}, "A")
    if family == "dense":
        ways["a clip below 0"] = lambda: ({"recurrent_grad_clip": -1.0}, "recurrent_grad_clip")
        ways["a cut in words"] = lambda: ({"cut_recurrent_grad": "yes"}, "cut_recurrent_grad")
    if family == "intra":
        ways["a chunk of half a step"] = lambda: ({"chunk_size": 0.5}, "chunk_size")
    way = source.choose(sorted(ways))
    wrong, named = ways[way]()
    try:
        call_with(s, case.tensors | given | wrong)
    except (ValueError, TypeError) as error:
        # a backend that was asked for may refuse the sizes before the op reads the values
        if not is_ours(error) or isinstance(error, Rejected):
            raise
        if not str(error).startswith(named):
            raise Fault(f"{way} for {named}: the error begins with another name: {error}") from error
        return []
    raise Fault(f"{way} for {named or name} was taken without a word")
