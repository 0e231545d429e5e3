"""Which kernels and device functions the source has, in which files, and what each function calls."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

KERNELS = Path(__file__).parents[2] / "src" / "holdfast" / "kernels"
_PACKAGE = "holdfast.kernels."
_JIT = ("triton.jit", "gluon.jit")
# kernel text that is made, not written: one for a launch a step
MADE = {"dense.alternating.cell_step.dense_cell_step_forward", "dense.alternating.cell_step.dense_cell_step_backward"}
# text of cells calls these by name
_CALLED_BY_TEXT = "dense.codegen.triton_functions"
_ENTRY = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\((?:[^()]|\([^()]*\))*\)\s*)?(\w+)\s*\(")
_CUDA = "dense/cuda"


@dataclass(frozen=True, slots=True)
class Definition:
    """A jit function, or a class with such methods, at the top of a file, on its lines from first to last.

    name: in full, as room.file.function. calls: what else it names, in full. first_warps: the functions, in full, that
    the first warps run where it shares its work out among warps.
    """

    name: str
    file: str
    first: int
    last: int
    is_function: bool
    calls: frozenset[str]
    first_warps: frozenset[str]


class Tree:
    """The kernels' files below a folder, read once."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @cached_property
    def files(self) -> frozenset[str]:
        """Of Python and of CUDA C++, by their paths below the folder."""
        found = [*self.root.rglob("*.py"), *self.root.rglob("*.cu*")]
        return frozenset(path.relative_to(self.root).as_posix() for path in found)

    @cached_property
    def line_names(self) -> dict[str, str]:
        """CUDA files by the name that their lines are compiled under, as a sanitizer prints no folder."""
        cuda = sorted(file for file in self.files if not file.endswith(".py"))
        found = {file.removeprefix(f"{_CUDA}/").replace("/", "_"): file for file in cuda}
        if len(found) != len(cuda):
            raise ValueError(f"{_CUDA}: two files have one name when their folders are joined to it: {cuda}")
        return found

    @cached_property
    def definitions(self) -> dict[str, Definition]:
        """Of the device, by their names in full."""
        found, imported = [], {}
        for file in sorted(file for file in self.files if file.endswith(".py")):
            module = file.removesuffix(".py").replace("/", ".")
            tree = ast.parse((self.root / file).read_text(encoding="utf-8"))
            known = dict(_imports(tree, module))
            imported |= {f"{module}.{name}": of for name, of in known.items()}
            own = {node: functions for node in tree.body if (functions := _jit_functions(node))}
            known |= {node.name: f"{module}.{node.name}" for node in own}
            for node, functions in own.items():
                calls = frozenset(name for each in functions for name in _named(each, known))
                first = frozenset(name for each in functions for name in _first_warps(each, known))
                span = node.lineno, node.end_lineno or node.lineno
                is_function = isinstance(node, ast.FunctionDef)
                found.append(Definition(known[node.name], file, *span, is_function, calls, first))

        own_names = {each.name for each in found}

        def origin(name: str) -> str:
            """Of a name that a file only hands on the one in the file that it is from, and of a method its class's."""
            while name in imported:
                name = imported[name]
            owner = name.rpartition(".")[0]
            return owner if owner in own_names else name

        return {
            each.name: replace(
                each,
                calls=frozenset(map(origin, each.calls)),
                first_warps=frozenset(map(origin, each.first_warps)),
            )
            for each in found
        }

    @cached_property
    def kernels(self) -> frozenset[str]:
        """What is launched: jit functions that no other one names, CUDA kernels, and what is made."""
        called = {name for each in self.definitions.values() for name in each.calls}
        found = {name for name, each in self.definitions.items() if each.is_function and name not in called}
        found = {name for name in found if not name.startswith(_CALLED_BY_TEXT)}
        for file in (file for file in self.files if file.endswith(".cu")):
            text = (self.root / file).read_text(encoding="utf-8")
            found |= {f"{_CUDA.replace('/', '.')}.{name}" for name in _ENTRY.findall(text)}
        return frozenset(found | MADE)

    def entries(self, kernel: str) -> list[Definition]:
        """The kernels that have this name in machine code: none if it is not the house's, or is of CUDA C++."""
        found = (name for name in sorted(self.kernels) if name.rpartition(".")[2] == kernel)
        return [self.definitions[name] for name in found if name in self.definitions]

    def reached(self, entry: Definition) -> frozenset[str]:
        """A kernel and all that it calls, by their names in full."""
        found, waiting = {entry.name}, [entry]
        while waiting:
            new = waiting.pop().calls & self.definitions.keys() - found
            found |= new
            waiting += [self.definitions[name] for name in new]
        return frozenset(found)

    def at(self, file: str, line: int) -> Definition | None:
        """What a line of a Python file stands in."""
        of_file = (each for each in self.definitions.values() if each.file == file)
        return next((each for each in of_file if each.first <= line <= each.last), None)


HOUSE = Tree(KERNELS)


def kernels() -> set[str]:
    """What is launched, as room.file.function: jit functions that no other one names, and CUDA kernels."""
    return set(HOUSE.kernels)


def names() -> frozenset[str]:
    """Kernels by the names that they have in machine code."""
    return frozenset(name.rpartition(".")[2] for name in HOUSE.kernels)


def module_of(path: Path) -> str:
    """As room.file."""
    return ".".join(path.relative_to(KERNELS).with_suffix("").parts)


def _is_jit(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(d).startswith(_JIT) for d in function.decorator_list)


def _jit_functions(node: ast.stmt) -> list[ast.FunctionDef]:
    """Of a statement those functions that are compiled for the device: itself, or a class's methods."""
    inside = node.body if isinstance(node, ast.ClassDef) else [node]
    return [each for each in inside if isinstance(each, ast.FunctionDef) and _is_jit(each)]


def _imports(tree: ast.Module, module: str) -> Iterator[tuple[str, str]]:
    """Names that a file imports from others of the kernels, anywhere in it."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom):
            continue
        if node.level:
            folder = module.split(".")[: -node.level]
            of = ".".join([*folder, node.module] if node.module else folder)
        elif (node.module or "").startswith(_PACKAGE):
            of = (node.module or "").removeprefix(_PACKAGE)
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


def _first_warps(function: ast.FunctionDef, known: dict[str, str]) -> Iterator[str]:
    """The functions that the first warps run where this one shares its work out, in full."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "warp_specialize":
            first, *rest = ast.unparse(node.args[0].elts[0].elts[0]).split(".")  # type: ignore[attr-defined]
            yield ".".join([known[first], *rest])
