"""The ways in which a scenario's calls are made. Each returns what the calls gave, to be judged."""

import threading
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from holdfast import ops
from holdfast.kernels import select as planning

from .case import Case, Tensors
from .judge import Result
from .layout import poison
from .misuse import misuse
from .modules import MODULES, compiler, module_calls
from .scenario import Scenario
from .source import Source
from .subjects import bind, named, options

Mode = Callable[[Scenario], list[Result]]
# what is recorded at the second call of a kind runs from the third on
_REPEATS = 4


def both_passes(
    case: Case, which: int = 0, call: Callable[[], Tensors] | None = None, between: Callable[[], None] | None = None
) -> Result:
    """One call and, where the scenario asks for gradients, its backward pass; between: runs between the two."""
    results = (call or case.run)()
    case.check_apart(results)
    values = {name: x.detach() for name, x in results.items()}
    if between is not None:
        between()
    if case.s.grads != "none":
        values |= case.gradients(results, which)
    return Result(case, values, which)


def plain(s: Scenario) -> list[Result]:
    return [both_passes(Case(s))]


def repeat(s: Scenario) -> list[Result]:
    """New values of the same shapes, call after call."""
    return [both_passes(Case(s, n)) for n in range(_REPEATS)]


def lengths(s: Scenario) -> list[Result]:
    """Longer and shorter calls in turn."""
    others = (s, s.longer(1), s, s.longer(16), s.longer(1))
    return [both_passes(Case(each, n)) for n, each in enumerate(others)]


def retain_graph(s: Scenario) -> list[Result]:
    """The backward pass of one call twice, the second time for other gradients; then a call of other values."""
    case = Case(s)
    results = case.run()
    case.check_apart(results)
    values = {name: x.detach() for name, x in results.items()}
    first = Result(case, values | case.gradients(results, 0, keep=True), 0)
    second = Result(case, values | case.gradients(results, 1, keep=False), 1)
    return [first, second, both_passes(Case(s, 1))]


def checkpointed(s: Scenario) -> list[Result]:
    """Inside torch.utils.checkpoint, which runs the forward pass again in the backward pass."""

    def once(n: int) -> Result:
        case = Case(s, n)
        names = list(case.tensors)

        def run(*tensors: Tensor) -> Tensors:
            return replaced(case, dict(zip(names, tensors, strict=True))).run()

        return both_passes(case, call=lambda: checkpoint(run, *case.tensors.values(), use_reentrant=False))

    return [once(n) for n in range(3)]


def replaced(case: Case, tensors: Tensors) -> Case:
    """The case with other tensors for its arguments."""
    other = object.__new__(Case)
    other.__dict__.update(case.__dict__, tensors=tensors)
    return other


def hooks(s: Scenario) -> list[Result]:
    """With hooks on what is saved, which hand back copies, and on the results' gradients."""

    def once(n: int) -> Result:
        case, seen = Case(s, n), []

        def call() -> Tensors:
            with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x):
                results = case.run()
            for x in results.values():
                if x.requires_grad:
                    x.register_hook(lambda grad: seen.append(grad))
            return results

        return both_passes(case, call=call)

    return [once(n) for n in range(3)]


def threads(s: Scenario) -> list[Result]:
    """Two threads at once, each with values of its own; half of the time of other lengths too."""
    results: list[Result] = []
    errors: list[BaseException] = []
    start = threading.Barrier(2)

    def work(cases: list[Case]) -> None:
        try:
            start.wait()
            results.extend(both_passes(case) for case in cases)
        except BaseException as error:
            errors.append(error)

    sets = [[Case(each, 3 * which + n) for n in range(3)] for which, each in enumerate((s, s.longer(s.seed & 1)))]
    workers = [threading.Thread(target=work, args=(cases,), daemon=True) for cases in sets]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]
    return results


def stream(s: Scenario) -> list[Result]:
    """On a stream that is not the default one, between calls on the default one."""
    cases = [Case(s, n) for n in range(4)]
    side = torch.cuda.Stream()
    results = [both_passes(cases[0])]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        results += [both_passes(case) for case in cases[1:3]]
    torch.cuda.current_stream().wait_stream(side)
    return [*results, both_passes(cases[3])]


class CaptureFailed(Exception):
    """A CUDA graph could not be captured; __cause__ says why. The process is not used again."""


def graph(s: Scenario) -> list[Result]:
    """Captured in a CUDA graph, which is replayed on other values."""
    case = Case(s, 0, writable=True)
    # its memory takes the values of the others
    case.is_ours_to_write = True
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            warm = both_passes(case)
            # drawn on the host, which a capture forbids
            names, grads = case.cotangents(case.run(), 0) if s.grads != "none" else ([], [])
            grads = [x.clone(memory_format=torch.contiguous_format) for x in grads]
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()

    captured = torch.cuda.CUDAGraph()
    failure: Exception | None = None
    values: Tensors = {}
    try:
        with torch.cuda.graph(captured):
            try:
                results = case.run()
                values = {name: x.detach() for name, x in results.items()}
                if s.grads != "none":
                    values |= case.pulled_back([results[name] for name in names], grads, case.tensors)
            except Exception as error:
                failure = error
    except Exception as error:
        failure = failure or error
    if failure is not None:
        raise CaptureFailed from failure

    found = [warm]
    for n in (1, 2):
        fresh = Case(s, n, writable=True)
        with torch.no_grad():
            for name, x in case.tensors.items():
                x.copy_(fresh.tensors[name])
            for name, x in zip(names, grads, strict=True):
                x.copy_(fresh.cotangent(name, x, 0))
        captured.replay()
        torch.cuda.synchronize()
        found.append(Result(fresh, {name: x.clone() for name, x in values.items()}))
    return found


def compiled(s: Scenario) -> list[Result]:
    """Compiled whole, at two lengths and two batches, forward and backward."""
    both_passes(Case(s))  # a refusal shows here without the compiler's words around it
    torch.compiler.reset()
    try:
        run = torch.compile(bind(s), fullgraph=True, backend=compiler(s))
        more = s.longer(1) if s.cu else replace(s.longer(1), B=s.B + 1)
        cases = [Case(s), Case(s.longer(1), 1), Case(more, 2)]
        return [both_passes(case, call=lambda: named(s, run(case.tensors, case.cu))) for case in cases]  # noqa: B023
    finally:
        torch.compiler.reset()


def autocast(s: Scenario) -> list[Result]:
    """float32 inputs under autocast."""

    def once(n: int) -> Result:
        case = Case(s, n)

        def call() -> Tensors:
            with torch.autocast(s.device, s.torch_dtype):
                return case.run()

        return both_passes(case, call=call)

    return [once(n) for n in range(3)]


def default_dtype(s: Scenario) -> list[Result]:
    """Under another default dtype, half of the time from the very first call on."""
    if s.seed & 1:
        planning.forget()
    before = torch.get_default_dtype()
    torch.set_default_dtype((torch.bfloat16, torch.float16, torch.float64)[s.seed % 3])
    try:
        return [both_passes(Case(s, n)) for n in range(3)]
    finally:
        torch.set_default_dtype(before)


def inplace(s: Scenario) -> list[Result]:
    """An argument is written to between the passes: autograd's error, or the gradient of the values before."""
    case = Case(s, writable=True)
    case.is_ours_to_write = True
    names = [*case.tensors, *(["cu_seqlens"] if case.cu is not None else [])]
    name = names[s.seed % len(names)]
    results = case.run()
    case.check_apart(results)
    values = {key: x.detach() for key, x in results.items()}
    with torch.no_grad():
        if name == "cu_seqlens":
            case.cu.mul_(2)
        elif case.tensors[name].dtype == torch.bool:
            case.tensors[name].logical_not_()
        else:
            case.tensors[name].mul_(-0.5)
    try:
        values |= case.gradients(results)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
    return [Result(case, values)]


def poisoned(s: Scenario) -> list[Result]:
    """With NaN in all memory that is handed out, before either pass; some calls' arguments are freed in between."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    device = torch.device(s.device)

    def once(n: int) -> Result:
        case = Case(s, n)
        poison(device)

        def on_copies() -> Tensors:
            return replaced(case, {name: x.clone() for name, x in case.tensors.items()}).run()

        return both_passes(case, call=on_copies if n % 2 else None, between=lambda: poison(device))

    try:
        return [once(n) for n in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)


# arguments with a time axis; the others are parameters
_IN_TIME = ("q", "k", "v", "g", "i", "f", "beta", "x", "dt", "B", "C", "z", "b", "w", "p", "r", "a")


def step(s: Scenario) -> list[Result]:
    """Token after token with holdfast.step, on one state."""
    case = Case(s)
    parts = ("C", "n", "m") if s.op == "mlstm" else ("initial_state",)
    state = tuple(case.tensors[name].clone(memory_format=torch.contiguous_format) for name in parts)
    rest = {name: x for name, x in case.tensors.items() if name not in parts}
    backend = None if s.backend == "default" else s.backend
    outputs = []
    for t in range(s.T):
        token = {
            name: x[:, t : t + 1] if name in _IN_TIME and x.dim() > 2 else x for name, x in rest.items()
        } | options(s)
        outputs.append(ops.step(s.op, token, state if s.op == "mlstm" else state[0], backend).clone())
    names = ("C", "n", "m") if s.op == "mlstm" else ("final",)
    return [Result(case, {"o": torch.cat(outputs, 1), **dict(zip(names, state, strict=True))})]


def inference(s: Scenario) -> list[Result]:
    """Under torch.inference_mode, or half of the time under torch.no_grad with arguments that could have a gradient."""
    if s.seed & 1:
        cases = [Case(s, n) for n in range(3)]
        for case in cases:
            for name, x in case.tensors.items():
                x.requires_grad_(case.kinds[name] != "bool")
        with torch.no_grad():
            return [both_passes(case) for case in cases]
    with torch.inference_mode():
        cases = [Case(s, n) for n in range(3)]
        results = [both_passes(case) for case in cases]
        for result in results:
            result.case.exact()
    return results


def jvp(s: Scenario) -> list[Result]:
    """Forward-mode derivatives: right, or refused."""
    case = Case(replace(s, grads="none"), writable=True)
    with forward_ad.dual_level():
        source, duals, exact = Source(s.seed), {}, {}
        for name, x in case.tensors.items():
            if case.kinds[name] == "bool":
                duals[name], exact[name] = x, x
                continue
            tangent = source.normal(*x.shape).to(x.device, x.dtype)
            duals[name] = forward_ad.make_dual(x, tangent)
            exact[name] = forward_ad.make_dual(case.before[name], tangent.double())
        results = replaced(case, duals).run()
        got, right = dict[str, Tensor](), dict[str, Tensor]()
        for name, x in case.exact_results(exact).items():
            primal, tangent = forward_ad.unpack_dual(x)
            right[name], right[f"t({name})"] = primal, torch.zeros_like(primal) if tangent is None else tangent
        for name, x in results.items():
            primal, tangent = forward_ad.unpack_dual(x)
            got[name], got[f"t({name})"] = primal, torch.zeros_like(primal) if tangent is None else tangent
    case.settle(right)
    return [Result(case, got)]


def twice(s: Scenario) -> list[Result]:
    """Differentiated twice: right, or autograd's error, since gradients are not differentiable themselves."""
    case = Case(s)

    def second(outputs: Tensors, inputs: Tensors) -> Tensors:
        names, grads = case.cotangents(outputs, 0)
        leaves = [inputs[name] for name in case.needing]
        through = [outputs[name] for name in names]
        once = torch.autograd.grad(through, leaves, grads, create_graph=True, allow_unused=True, materialize_grads=True)
        draw = Source(s.seed)
        weights = [draw.normal(*x.shape).to(x.device, x.dtype) for x in once]
        found = torch.autograd.grad(once, leaves, weights, allow_unused=True, materialize_grads=True)
        return dict(zip(case.needing, found, strict=True))

    results = case.run()
    values = {name: x.detach() for name, x in results.items()}
    try:
        found = second(results, case.tensors)
    except RuntimeError as error:
        if "differentiate twice" in str(error) or "does not require grad" in str(error):
            return [Result(case, values)]
        raise
    exact = {name: x.clone().requires_grad_(name in case.needing) for name, x in case.before.items()}
    right = case.exact_results(exact)
    plain_right = {name: x.detach() for name, x in right.items()}
    case.settle(plain_right | {f"dd{name}": x for name, x in second(right, exact).items()})
    return [Result(case, values | {f"dd{name}": x for name, x in found.items()})]


MODES: dict[str, Mode] = {
    "plain": plain,
    "repeat": repeat,
    "lengths": lengths,
    "retain_graph": retain_graph,
    "checkpoint": checkpointed,
    "hooks": hooks,
    "threads": threads,
    "stream": stream,
    "graph": graph,
    "compile": compiled,
    "autocast": autocast,
    "default_dtype": default_dtype,
    "inplace": inplace,
    "poison": poisoned,
    "step": step,
    "inference": inference,
    "jvp": jvp,
    "twice": twice,
    "misuse": misuse,
}


def run_mode(s: Scenario) -> list[Result]:
    """Makes the scenario's calls."""
    return module_calls(s) if s.op in MODULES else MODES[s.mode](s)
