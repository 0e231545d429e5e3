"""Which kernels the source has, and what stands where a sanitizer points."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

KERNELS = Path(__file__).parents[2] / "src" / "holdfast" / "kernels"
_JIT = ("triton.jit", "gluon.jit")
# kernel text that is made, not written: one for a launch a step
MADE = {"dense.step.step_forward", "dense.step.step_backward"}
# text of cells calls these by name
_CALLED_BY_TEXT = "dense.cells.triton_functions"
_ENTRY = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\((?:[^()]|\([^()]*\))*\)\s*)?(\w+)\s*\(")


def kernels() -> set[str]:
    """What is launched, as family.file.function: jit functions that no other one names, and CUDA kernels."""
    functions: dict[str, ast.FunctionDef] = {}
    named: set[str] = set()
    for path in sorted(KERNELS.rglob("*.py")):
        module, tree = module_of(path), ast.parse(path.read_text(encoding="utf-8"))
        own = {f.name: f for f in tree.body if isinstance(f, ast.FunctionDef) and _is_jit(f)}
        functions |= {f"{module}.{name}": f for name, f in own.items()}
        known = dict(_imports(tree, module)) | {name: f"{module}.{name}" for name in own}
        for function in own.values():
            named |= set(_named(function, known))
    found = {name for name in functions if name not in named and not name.startswith(_CALLED_BY_TEXT)}
    for path in sorted(KERNELS.rglob("*.cu")):
        found |= {f"dense.cuda.{name}" for name in _ENTRY.findall(path.read_text(encoding="utf-8"))}
    return found | MADE


@cache
def names() -> frozenset[str]:
    """Kernels by the names that they have in machine code."""
    return frozenset(name.rpartition(".")[2] for name in kernels())


def is_there(file: str) -> bool:
    """Whether it is a file of the kernels."""
    return _lines(file)[0] is not None


def module_of(path: Path) -> str:
    """As family.file."""
    return ".".join(path.relative_to(KERNELS).with_suffix("").parts)


def _is_jit(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(d).startswith(_JIT) for d in function.decorator_list)


def _imports(tree: ast.Module, module: str) -> Iterator[tuple[str, str]]:
    """Names that a file imports from others of the kernels, anywhere in it."""
    folder = module.rpartition(".")[0]
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom):
            continue
        if node.level == 1:
            of = f"{folder}.{node.module}" if node.module else folder
        elif node.level == 0 and (node.module or "").startswith("holdfast.kernels."):
            of = (node.module or "").removeprefix("holdfast.kernels.")
        else:
            continue
        for each in node.names:
            yield each.asname or each.name, f"{of}.{each.name}"


def _named(function: ast.FunctionDef, known: dict[str, str]) -> Iterator[str]:
    """What a function's body names, in full; a name that it gives to something of its own is not another's."""
    nodes = [each for statement in function.body for each in ast.walk(statement)]
    own = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own |= {argument.arg for argument in function.args.args}
    for node in nodes:
        if isinstance(node, ast.Name) and node.id in known and node.id not in own:
            yield known[node.id]
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in known:
            yield f"{known[node.value.id]}.{node.attr}"


@cache
def _lines(file: str) -> tuple[Path | None, list[str]]:
    """A file of that name among the kernels, of which there is one; None and no lines for another's, or for no name."""
    name = Path(file).name
    found = [path for path in sorted(KERNELS.rglob(name)) if path.is_file()] if name else []
    return (found[0], found[0].read_text(encoding="utf-8").splitlines()) if found else (None, [])


@cache
def _functions(file: str) -> tuple[tuple[int, int, str], ...]:
    """First and last line and name of each function of a Python file, inner ones after outer ones."""
    path, lines = _lines(file)
    if path is None or path.suffix != ".py":
        return ()
    tree = ast.parse("\n".join(lines))
    spans = [(f.lineno, f.end_lineno or f.lineno, f.name) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef)]
    return tuple(sorted(spans))


@cache
def _shared_out() -> dict[tuple[str, str], str]:
    """Of each file and kernel that shares its work out among warps the file of the first ones' function, if another."""
    found = {}
    for path in sorted(KERNELS.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        known = dict(_imports(tree, module_of(path)))
        for function in (f for f in tree.body if isinstance(f, ast.FunctionDef) and _is_jit(f)):
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "gl.warp_specialize":
                    first = ast.unparse(node.args[0].elts[0].elts[0])  # type: ignore[attr-defined]
                    if first in known:
                        found[path.name, function.name] = known[first].split(".")[1] + ".py"
    return found


def first_warps(file: str, line: int) -> str:
    """The file that a line of shared memory's accesses is of.

    The function of the first warps in gl.warp_specialize is compiled into the kernel itself. Triton then gives its
    instructions their line, but the kernel's file. What the kernel does before it shares work out is not told apart;
    of shared memory it only initialises mbarriers, which no race is reported of. The kernel's own first line is what
    an instruction has to which the compiler gives none.
    """
    inside = [(first, name) for first, last, name in _functions(file) if first <= line <= last]
    if not inside or inside[-1][0] == line:
        return file
    return _shared_out().get((Path(file).name, inside[-1][1]), file)


# a function of CUDA C++ as this project writes it: a line that opens a parameter list and begins at the left margin, or
# is a member's
_CUDA_FUNCTION = re.compile(
    r"^(?:\s+(?:template <[^>]*> )?(?:static )?HF_DEVICE\s|(?!\s|#|//|\*))(?:[^=;]*?\s)?\*?(\w+)\("
)


def place(file: str, line: int) -> tuple[str, str]:
    """The function that a line stands in and the line's text, spaces made one: what survives other lines' moves."""
    _, lines = _lines(file)
    text = " ".join(lines[line - 1].split()) if 0 < line <= len(lines) else ""
    inside = [name for first, last, name in _functions(file) if first <= line <= last]
    if inside:
        return inside[-1], text
    for above in reversed(lines[:line] if file.endswith((".cu", ".cuh")) else []):
        if found := _CUDA_FUNCTION.match(above):
            return found[1], text
    return "", text


def stands(file: str, function: str, text: str) -> bool:
    """Whether that function of that file still has a line of that text."""
    _, lines = _lines(file)
    return any(place(file, n) == (function, text) for n in range(1, len(lines) + 1))
