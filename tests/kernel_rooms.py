"""What the rules of the kernels' rooms forbid, found in a tree of source; test_kernel_rooms.py says what is allowed.

Each check takes the package's folder, src/holdfast or a planted one, and returns its offenders.
"""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from source_tree import imported_names, nodes, parse, python_files

KERNELS = "holdfast.kernels"
MODELS = "holdfast.planner.models"
# what knows no recurrence, and serves every room
SHARED = ("lib", "runtime", "autograd")
# families whose folders are mechanisms of their own
FAMILIES = ("matrix", "chunk")
# rooms that every mechanism of their family may use
PASSAGES = (("matrix", "state_passing"),)
TARGETS = ("torch", "triton", "hopper", "blackwell", "cuda", "gluon", "metal")
# folders of a room that hold code for one target, or one way to run it
SIDES = (*TARGETS, "alternating", "gates", "inputs", "weight_grad", "codegen", "onchip", "wide", "one_block")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """A file below kernels/. path: relative to it; parts: its folders and stem."""

    path: Path
    tree: ast.Module

    @property
    def parts(self) -> tuple[str, ...]:
        return (*self.path.parts[:-1], self.path.stem)

    @property
    def name(self) -> str:
        parts = self.parts[:-1] if self.path.stem == "__init__" else self.parts
        return ".".join((KERNELS, *parts))

    @cached_property
    def imports(self) -> list[tuple[int, str]]:
        return list(imported_names(self.tree, ("holdfast", "kernels", *self.path.parts[:-1])))


def modules(source: Path) -> list[Module]:
    folder = source / "kernels"
    return [Module(path.relative_to(folder), parse(path)) for path in python_files(folder)]


def is_room(parts: tuple[str, ...]) -> bool:
    """Whether a file is in a room of a recurrence, and not in what serves all."""
    return len(parts) > 1 and parts[0] not in SHARED


def room_of(folders: tuple[str, ...]) -> tuple[str, ...]:
    """The room that folders below kernels/ lie in: a mechanism's of the families that have several."""
    return folders[:2] if folders[:1] and folders[0] in FAMILIES else folders[:1]


def below(name: str, package: str) -> tuple[str, ...] | None:
    """The parts of a dotted name below a package, or None where it is elsewhere."""
    return tuple(name.split(".")[package.count(".") + 1 :]) if f"{name}.".startswith(f"{package}.") else None


def _folders(source: Path, package: str, parts: tuple[str, ...]) -> tuple[str, ...]:
    """Those parts of an imported name that are folders."""
    folder = source.joinpath(*package.split(".")[1:])
    found = 0
    while found < len(parts) and folder.joinpath(*parts[: found + 1]).is_dir():
        found += 1
    return parts[:found]


def _crossing(source: Path, module: Module, name: str) -> str | None:
    """What of another mechanism an imported name is, in the room that `module` is in."""
    room = room_of(module.path.parts[:-1])
    for package in (KERNELS, MODELS):
        parts = below(name, package)
        if parts is None:
            continue
        target = room_of(_folders(source, package, parts))
        if not target or target[0] in SHARED or target == room or target in PASSAGES:
            return None
        # the top of the family
        return None if target == room[: len(target)] else ".".join([package.removeprefix("holdfast."), *target])
    return None


def crossings(source: Path) -> list[str]:
    """Rule 1: imports of one mechanism's room or model in another's, `importer -> imported`."""
    found = set()
    for module in modules(source):
        if is_room(module.parts):
            for _, name in module.imports:
                if target := _crossing(source, module, name):
                    found.add(f"{module.path} -> {target}")
    return sorted(found)


def between_targets(source: Path) -> list[str]:
    """Rule 2: what hopper/ takes from triton/ of its own room, but for segment_* modules."""
    found = set()
    for module in modules(source):
        if "hopper" not in module.parts[:-1] or not is_room(module.parts):
            continue
        room = room_of(module.path.parts[:-1])
        for _, name in module.imports:
            parts = below(name, ".".join((KERNELS, *room)))
            if parts and parts[0] == "triton" and not any(part.startswith("segment_") for part in parts[1:2]):
                found.add(f"{module.path} -> {'.'.join(parts[:2])}")
    return sorted(found)


def upward(source: Path) -> list[str]:
    """Rule 3: what serves all knows no family; runtime/ no lib/; lib/gluon/ beside hopper/ nothing of it."""
    found = set()
    for module in modules(source):
        if module.parts[0] not in SHARED:
            continue
        for line, name in module.imports:
            parts = below(name, KERNELS)
            if parts is None:
                continue
            folders = _folders(source, KERNELS, parts)
            is_family = bool(folders) and folders[0] not in SHARED
            is_lib = module.parts[0] == "runtime" and folders[:1] == ("lib",)
            is_hopper = module.parts[:2] == ("lib", "gluon") and "hopper" not in module.parts
            if is_family or is_lib or (is_hopper and folders[:3] == ("lib", "gluon", "hopper")):
                found.add(f"{module.path}:{line}: {'.'.join(parts)}")
    return sorted(found)


def stems(source: Path) -> dict[str, list[str]]:
    """Rule 4: the names of the files in the rooms, and where they are."""
    found = defaultdict(list)
    for path in sorted((source / "kernels").rglob("*")):
        place = path.relative_to(source / "kernels")
        if path.suffix in (".py", ".cu", ".cuh") and is_room(place.parts) and path.stem != "__init__":
            found[path.stem].append(str(place))
    return dict(found)


def listed_stems(readme: str) -> list[str]:
    """Those of the table of file names in kernels/README.md, whose first column has them between backquotes."""
    _, _, table = readme.partition("## The files of a room")
    rows = re.findall(r"^\| (`.*?) \|", table.partition("\n## ")[0], re.M)
    return [stem for row in rows for stem in re.findall(r"`([\w.]+)`", row)]


def told_twice(source: Path) -> list[str]:
    """Rule 5: file names that repeat a target or a mechanism, which the path says, or have more than three words."""
    folder = source / "kernels"
    folders = {part for path in folder.rglob("*.py") for part in path.relative_to(folder).parts[:-1]}
    mechanisms = folders - {*SIDES, *SHARED, *FAMILIES}
    words = [name.split("_") for name in sorted({*mechanisms, *TARGETS})]
    found = []
    for stem, places in stems(source).items():
        own = stem.split("_")
        if len(own) > 3 or any(_within(each, own) for each in words):
            found += places
    return sorted(found)


def _within(words: list[str], own: list[str]) -> bool:
    return any(own[start : start + len(words)] == words for start in range(len(own)))


@cache
def is_jit(function: Function) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def functions(tree: ast.AST) -> Iterator[Function]:
    return (node for node in nodes(tree) if isinstance(node, Function))


def parameters(function: Function) -> int:
    """How many a function has, self and cls left out."""
    given = function.args
    names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


class Kernels:
    """The jit functions of a tree: which call which, and so which are launched."""

    def __init__(self, source: Path) -> None:
        self.modules = modules(source)
        self.jits = {(each.name, f.name): f for each in self.modules for f in functions(each.tree) if is_jit(f)}
        called = {target for each in self.modules for target in self._called(each)}
        self.entries = {key for key in self.jits if key not in called and not self._is_called_otherwise(*key)}

    def _is_called_otherwise(self, where: str, name: str) -> bool:
        """Methods, and what generated code calls."""
        return ".codegen." in where or any(each.arg == "self" for each in self.jits[where, name].args.args[:1])

    def _called(self, module: Module) -> Iterator[tuple[str, str]]:
        """The jit functions that a module's jit functions refer to, by their own names or as a module's."""
        names = _imported(module) | {name: f"{where}.{name}" for where, name in self.jits if where == module.name}
        for node in (node for f in filter(is_jit, functions(module.tree)) for node in nodes(f)):
            if isinstance(node, ast.Name):
                where, _, name = names.get(node.id, "").rpartition(".")
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                where, name = names.get(node.value.id, ""), node.attr
            else:
                continue
            if (where, name) in self.jits:
                yield where, name


def _imported(module: Module) -> dict[str, str]:
    """Local name -> what it is from, of the module's imports."""
    found = {}
    package = ("holdfast", "kernels", *module.path.parts[:-1])
    for node in nodes(module.tree):
        if isinstance(node, ast.ImportFrom):
            outer = package[: len(package) - node.level + 1] if node.level else ()
            start = ".".join([*outer, *([node.module] if node.module else [])])
            found |= {alias.asname or alias.name: f"{start}.{alias.name}" for alias in node.names}
    return found


LIMITS = {"device": 8, "entry": 40, "host": 10}


def with_many_parameters(source: Path) -> dict[str, int]:
    """Rule 6: `kind path function` -> how many parameters, of those that have more than their kind may."""
    kernels, found = Kernels(source), {}
    for module in kernels.modules:
        for function in functions(module.tree):
            kind = "host"
            if is_jit(function):
                kind = "entry" if (module.name, function.name) in kernels.entries else "device"
            if (count := parameters(function)) > LIMITS[kind]:
                found[f"{kind} {module.path} {function.name}"] = count
    return dict(sorted(found.items()))


def holes(source: Path) -> dict[str, int]:
    """Rule 7: `path function` -> values that a jit function unpacks into `_`: a swap of two would be seen by nobody."""
    found = Counter()
    for module in modules(source):
        for function in filter(is_jit, functions(module.tree)):
            for node in nodes(function):
                if isinstance(node, ast.Tuple) and isinstance(node.ctx, ast.Store):
                    names = [each.id for each in node.elts if isinstance(each, ast.Name)]
                    found[f"{module.path} {function.name}"] += sum(set(name) == {"_"} for name in names)
    return {place: count for place, count in sorted(found.items()) if count}


def launches_elsewhere(source: Path) -> list[str]:
    """Rule 8: files that launch a kernel and are not called so: by one of runtime's functions, or as kernel[grid]."""
    found = set()
    for module in modules(source):
        if module.parts[0] == "runtime" or module.path.stem.startswith("launch"):
            continue
        in_jit = {id(node) for function in filter(is_jit, functions(module.tree)) for node in nodes(function)}
        by_name = any(re.fullmatch(rf"{KERNELS}\.runtime\.\w+\.launch\w*", name) for _, name in module.imports)
        calls = (node for node in nodes(module.tree) if isinstance(node, ast.Call) and id(node) not in in_jit)
        if by_name or any(_has_grid(call) for call in calls):
            found.add(str(module.path))
    return sorted(found)


def _has_grid(call: ast.Call) -> bool:
    if not isinstance(call.func, ast.Subscript):
        return False
    return isinstance(call.func.slice, ast.Tuple | ast.Lambda) or "grid" in ast.unparse(call.func.slice)


def past_the_backend(source: Path) -> list[str]:
    """Rule 9: what ops/ imports of a room's target but a backend's class, `importer -> imported`."""
    found = set()
    for path in python_files(source / "ops"):
        place = path.relative_to(source)
        for _, name in imported_names(parse(path), ("holdfast", *place.parts[:-1])):
            parts = below(name, KERNELS)
            if parts is None or not is_room(parts) or len(_folders(source, KERNELS, parts)) < 2:
                continue
            if not set(SIDES) & set(parts) or parts[-1][:1].isupper():
                continue
            found.add(f"{place} -> {'.'.join(parts)}")
    return sorted(found)


def full_rooms(source: Path, most: int) -> list[str]:
    """Rule 12: folders with more files than fit on one screen."""
    found = []
    for folder in sorted({path.parent for path in (source / "kernels").rglob("*") if path.is_file()}):
        if "__pycache__" not in folder.parts:
            count = sum(path.is_file() for path in folder.iterdir())
            if count > most:
                found.append(f"{folder.relative_to(source)}: {count} files")
    return found


def words_of(identifier: str) -> list[str]:
    """The words of a name in snake_case, CamelCase or capitals."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", identifier)]


def identifiers(tree: ast.AST) -> set[str]:
    """The names that a module makes: of functions, classes, arguments, attributes, variables and imports as."""
    found = set()
    for node in nodes(tree):
        if isinstance(node, Function | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.alias) and node.asname:
            found.add(node.asname)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


def banned_words(glossary: str) -> dict[str, list[str]]:
    """Banned word -> the terms that stand for it, from the glossary's column `instead of`."""
    found = defaultdict(list)
    for table in re.split(r"^## ", glossary, flags=re.M):
        lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\|.*\|$", table, re.M)]
        if not lines or "instead of" not in lines[0]:
            continue
        column = lines[0].index("instead of")
        for row in lines[2:]:
            for word in re.findall(r"`(\w+)`", row[column]):
                found[word].append(row[0])
    return dict(found)


def synonyms(source: Path, banned: Iterable[str]) -> dict[str, int]:
    """Rule 13: banned word -> how many identifiers of the kernels' files have it, each once a file.

    A word of several parts, such as place_of, is looked for as a whole.
    """
    found, wanted = Counter(), {tuple(words_of(word)): word for word in banned}
    for module in modules(source):
        for name in identifiers(module.tree):
            own = words_of(name)
            for parts, word in wanted.items():
                if _within(list(parts), own):
                    found[word] += 1
    return dict(sorted(found.items()))


def other_aggregates(source: Path) -> list[str]:
    """Rule 15: aggregates from elsewhere than lib's compat.py, or beside annotations that are not evaluated."""
    found = []
    for module in modules(source):
        shims = [f"{KERNELS}.lib.{language}.compat" for language in ("gluon", "triton")]
        if module.name in shims:
            continue
        names = [(line, name) for line, name in module.imports if name.rpartition(".")[2].strip("_") == "aggregate"]
        found += [f"{module.path}:{line}: {name}" for line, name in names if name.rpartition(".")[0] not in shims]
        decorators = [
            each for node in nodes(module.tree) if isinstance(node, ast.ClassDef) for each in node.decorator_list
        ]
        made = [each for each in decorators if ast.unparse(each).rpartition(".")[2].strip("_") == "aggregate"]
        found += [
            f"{module.path}:{each.lineno}: {ast.unparse(each)}" for each in made if not isinstance(each, ast.Name)
        ]
        if made and any(name == "__future__.annotations" for _, name in module.imports):
            found.append(f"{module.path}:{made[0].lineno}: annotations are not evaluated beside an aggregate")
    return found


def same_entries(source: Path) -> dict[str, int]:
    """Kernel entries' names -> how many of the house have it, of those that a profiler cannot tell apart."""
    counts = Counter(name for _, name in Kernels(source).entries)
    return {name: count for name, count in sorted(counts.items()) if count > 1}
