"""Prints a graph of pointwise ATen operations as expressions of a language in float32, one variable a node.

Functions have C's names, and hf_* those that C++ or CUDA would compute less accurately or slower: cuda/functions.cuh
and triton_functions.py define them.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from holdfast.recurrences.torch_private import name_of

from .language import Language

_BINARY = {"add": "+", "sub": "-", "mul": "*", "div": "hf_div"}
_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_BOTH, _EITHER = ("logical_and", "bitwise_and"), ("logical_or", "bitwise_or")
_UNARY = {
    "neg": "-({})",
    "exp": "hf_exp({})",
    "exp2": "exp2f({})",
    "expm1": "expm1f({})",
    "log": "logf({})",
    "log2": "log2f({})",
    "log10": "log10f({})",
    "log1p": "log1pf({})",
    "sqrt": "sqrtf({})",
    "rsqrt": "hf_div({one}, sqrtf({}))",
    "reciprocal": "hf_div({one}, {})",
    "sigmoid": "hf_sigmoid({})",
    "tanh": "hf_tanh({})",
    "sin": "sinf({})",
    "cos": "cosf({})",
    "tan": "tanf({})",
    "asin": "asinf({})",
    "acos": "acosf({})",
    "atan": "atanf({})",
    "sinh": "sinhf({})",
    "cosh": "coshf({})",
    "asinh": "asinhf({})",
    "acosh": "acoshf({})",
    "atanh": "atanhf({})",
    "erf": "erff({})",
    "erfc": "erfcf({})",
    "floor": "floorf({})",
    "ceil": "ceilf({})",
    "trunc": "truncf({})",
    "round": "rintf({})",
    "abs": "fabsf({})",
    "sign": "hf_sign({})",
    "relu": "hf_max({}, {zero})",
}
_TESTS = {"isnan": "hf_isnan({})", "isinf": "hf_isinf({})", "signbit": "hf_signbit({})"}


class Unprintable(ValueError):
    """The graph has an operation that the printer does not know."""


def statements(
    graph: fx.Graph, inputs: Mapping[str, str], language: Language, rounds: bool = False
) -> tuple[list[str], list[str]]:
    """(lines that compute every node, the expressions of the outputs). inputs: what each placeholder reads.

    rounds: whether the first output is rounded to the operands' dtype, and the graph does not read it back.

    A sigmoid or tanh whose only use is a product stays a fraction until then where the language has fractions, so that
    two of them share a reciprocal. Raises Unprintable, naming the operation, for one that has no form in float32.
    """
    names: dict[fx.Node, str] = {}
    kinds: dict[fx.Node, str] = {}
    fractions: dict[fx.Node, tuple[str, str]] = {}
    printed: dict[tuple[str, str], str] = {}
    lines: list[str] = []
    results: list[str] = []
    rounded = _rounded_next(graph) if rounds else set()
    one = language.number(1.0)
    shared = ("sigmoid", "tanh") if language.fractions else ()

    def read(value: Any, kind: str = "float") -> str:
        return _value(value, names, kinds, kind, language)

    for node in graph.nodes:
        if node.op == "placeholder":
            names[node], kinds[node] = inputs[node.name], "float"
            continue
        if node.op == "output":
            results = [read(x) for x in node.args[0]]
            continue
        if node in rounded:
            text, kind = f"hf_tanh_before_rounding({read(node.args[0])})", "float"
        elif _is(node, *shared) and [_is(user, "mul") for user in node.users] == [True]:
            argument = read(node.args[0])
            if _is(node, "sigmoid"):
                fractions[node] = (one, f"({one} + hf_exp2(-HF_LOG2E * {argument}))")
            else:
                over, under = f"n_{node.name}", f"d_{node.name}"
                lines.append(f"float {over}, {under}; hf_tanh_parts({argument}, {over}, {under});")
                fractions[node] = (over, under)
            continue
        elif any(x in fractions for x in node.all_input_nodes):
            parts = [fractions.get(x) or (read(x), one) for x in node.args[:2]]
            over, under = (_times([part[k] for part in parts], one) for k in (0, 1))
            text, kind = f"{over} * hf_reciprocal({under})" if over != one else f"hf_reciprocal({under})", "float"
        else:
            text, kind = _print(node, kinds, read, language)
        # graphs share common subexpressions; different nodes may still print alike, as zeros do
        if (kind, text) not in printed:
            printed[kind, text] = f"v_{node.name}"
            lines.append(language.declare.format(kind=kind, name=f"v_{node.name}", text=text))
        names[node], kinds[node] = printed[kind, text], kind
    return lines, results


def _rounded_next(graph: fx.Graph) -> set[fx.Node]:
    """Each tanh that reaches the first output alone, and through products alone, so that its relative error stays."""
    output = next(node for node in graph.nodes if node.op == "output")
    last = output.args[0][0]
    found: set[fx.Node] = set()
    if output.args[0].count(last) == 1 and set(last.users) == {output}:
        found.add(last)
    for node in reversed(graph.nodes):
        if node.op == "call_function" and node.users and all(x in found and _is(x, "mul") for x in node.users):
            found.add(node)
    return {node for node in found if _is(node, "tanh")}


def _is(node: fx.Node, *operations: str) -> bool:
    return node.op == "call_function" and name_of(node.target) in operations


def _times(factors: list[str], one: str) -> str:
    return " * ".join(factor for factor in factors if factor != one) or one


def reads(graph: fx.Graph) -> set[str]:
    """The placeholders whose values matter; full_like takes only a shape."""
    return {
        argument.name
        for node in graph.nodes
        if not str(node.target).startswith("aten.full_like")
        for argument in node.all_input_nodes
        if argument.op == "placeholder"
    }


def _print(node: fx.Node, kinds: Mapping[fx.Node, str], read: Any, language: Language) -> tuple[str, str]:
    operation = name_of(node.target)
    args, kwargs = list(node.args), dict(node.kwargs)
    if operation in _BINARY:
        return _arithmetic(operation, args, kwargs, read), "float"
    if operation in _COMPARE:
        return f"{read(args[0])} {_COMPARE[operation]} {read(args[1])}", "bool"
    if operation in (*_BOTH, *_EITHER, "logical_xor", "bitwise_xor"):
        if any(kinds.get(x, "bool") != "bool" for x in node.all_input_nodes):
            raise Unprintable(f"aten.{operation} of numbers; only of bools is it printed")
        how = language.both if operation in _BOTH else language.either if operation in _EITHER else "{} != {}"
        return how.format(read(args[0], "bool"), read(args[1], "bool")), "bool"
    if operation in ("logical_not", "bitwise_not"):
        return language.negate.format(read(args[0], "bool")), "bool"
    if operation == "where":
        kind = "bool" if all(kinds.get(x) == "bool" for x in args[1:]) else "float"
        return language.choose.format(read(args[0], "bool"), read(args[1], kind), read(args[2], kind)), kind
    if operation in _TESTS:
        return _TESTS[operation].format(read(args[0])), "bool"
    if operation in _UNARY:
        return _UNARY[operation].format(read(args[0]), one=read(1.0), zero=read(0.0)), "float"
    if operation in ("scalar_tensor", "full_like", "full"):
        value = args[0] if operation == "scalar_tensor" else args[1]
        kind = "bool" if isinstance(value, bool) or kwargs.get("dtype") == torch.bool else "float"
        return read(value, kind), kind
    if operation == "_to_copy":
        dtype = kwargs.get("dtype", torch.float32)
        if dtype == torch.bool:
            return read(args[0], "bool"), "bool"
        if dtype == torch.float32:
            return read(args[0]), "float"
        raise Unprintable(f"a value in {dtype}; only float32 and bool are printed")
    if operation in _SPECIAL:
        return _SPECIAL[operation](args, kwargs, read), "float"
    raise Unprintable(f"aten.{operation} has no printed form")


def _arithmetic(operation: str, args: list[Any], kwargs: dict[str, Any], read: Any) -> str:
    if kwargs.get("rounding_mode"):
        raise Unprintable("a division that rounds")
    left, right = read(args[0]), read(args[1])
    alpha = kwargs.get("alpha", args[2] if len(args) > 2 else 1)
    if alpha != 1:
        right = f"{read(alpha)} * {right}"
    if operation == "div":
        return f"hf_div({left}, {right})"
    return f"{left} {_BINARY[operation]} {right}"


def _clamp(args: list[Any], kwargs: dict[str, Any], read: Any) -> str:
    low = kwargs.get("min", args[1] if len(args) > 1 else None)
    high = kwargs.get("max", args[2] if len(args) > 2 else None)
    text = read(args[0])
    if low is not None:
        text = f"hf_max({text}, {read(low)})"
    return text if high is None else f"hf_min({text}, {read(high)})"


def _power(args: list[Any], kwargs: dict[str, Any], read: Any) -> str:
    base, exponent = read(args[0]), args[1]
    if not isinstance(exponent, fx.Node):
        if exponent in (1, 2, 3):
            return " * ".join([base] * int(exponent))
        if exponent == 0.5:
            return f"sqrtf({base})"
        if exponent == -1:
            return f"hf_div({read(1.0)}, {base})"
    return f"powf({base}, {read(exponent)})"


def _gelu(args: list[Any], kwargs: dict[str, Any], read: Any) -> str:
    x, half, one = read(args[0]), read(0.5), read(1.0)
    if kwargs.get("approximate", "none") == "tanh":
        cubic = f"{x} + {read(0.044715)} * {x} * {x} * {x}"
        return f"{half} * {x} * ({one} + hf_tanh({read(0.7978845608)} * ({cubic})))"
    return f"{half} * {x} * ({one} + erff({read(0.7071067812)} * {x}))"


_SPECIAL: dict[str, Callable[[list[Any], dict[str, Any], Any], str]] = {
    "clamp": _clamp,
    "clamp_min": lambda a, k, read: f"hf_max({read(a[0])}, {read(a[1])})",
    "clamp_max": lambda a, k, read: f"hf_min({read(a[0])}, {read(a[1])})",
    "maximum": lambda a, k, read: f"hf_max({read(a[0])}, {read(a[1])})",
    "minimum": lambda a, k, read: f"hf_min({read(a[0])}, {read(a[1])})",
    "fmod": lambda a, k, read: f"fmodf({read(a[0])}, {read(a[1])})",
    "atan2": lambda a, k, read: f"atan2f({read(a[0])}, {read(a[1])})",
    "pow": _power,
    "gelu": _gelu,
    "copysign": lambda a, k, read: f"copysignf({read(a[0])}, {read(a[1])})",
    "copy": lambda a, k, read: read(a[1]),
    "sigmoid_backward": lambda a, k, read: f"{read(a[0])} * ({read(a[1])} * ({read(1.0)} - {read(a[1])}))",
    "tanh_backward": lambda a, k, read: f"{read(a[0])} * ({read(1.0)} - {read(a[1])} * {read(a[1])})",
}


def _value(
    value: Any, names: Mapping[fx.Node, str], kinds: Mapping[fx.Node, str], kind: str, language: Language
) -> str:
    if not isinstance(value, fx.Node):
        if kind == "bool":
            return language.true if value else language.false
        return language.number(float(value))
    found = kinds[value]
    if found == kind:
        return names[value]
    if kind == "float":
        return f"({language.choose.format(names[value], language.number(1.0), language.number(0.0))})"
    return f"({names[value]} != {language.number(0.0)})"
