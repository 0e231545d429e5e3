"""What stands where a sanitizer points: it prints a file's name, often without its folders, a line, and the kernel."""

import ast
import re
from functools import cache

from .sources import HOUSE, Definition, Tree

# between the files of a place of which it cannot be told in which of them it is, and what is said of such a place
_OR = " or "
AMBIGUOUS = "it cannot be told which of the files this is"
_BELOW = "/holdfast/kernels/"
# what a line of Gluon says that makes an access to shared memory through registers
_MAKES = {"Read": re.compile(r"\.load\("), "Write": re.compile(r"\.store\(")}


def is_there(file: str, tree: Tree = HOUSE) -> bool:
    """Whether it is a file of the kernels, or one of several."""
    return any(one in tree.files for one in file.split(_OR))


@cache
def located(printed: str, line: int, kernel: str, function: str = "", access: str = "", tree: Tree = HOUSE) -> str:
    """The file of a place, by its path below the kernels' folder; the bare name of a file that is none of them.

    printed: the file, with folders or without. kernel: that ran, by its name in machine code; function: that the place
    is said to be in; "" where that is not said. access: what races there, "Read" say, or "", see first_warps. Of
    several files of the name it is the one that the kernel reaches, at that line if need be; where several are left all
    of them are returned, with "or" between.
    """
    files = _named(printed, tree)
    if access:
        files = {each for file in files for each in first_warps(file, line, kernel, access, tree)}
    reached = {name for entry in tree.entries(kernel) for name in tree.reached(entry)}
    definitions = [tree.definitions[name] for name in reached]
    for fitting in (
        {each.file for each in definitions},
        {each.file for each in definitions if each.first <= line <= each.last},
        {file for file in files if function and place(file, line, tree)[0] == function},
    ):
        if len(files) > 1 and files & fitting:
            files = files & fitting
    return _OR.join(sorted(files)) or printed.rpartition("/")[2]


def _named(printed: str, tree: Tree) -> set[str]:
    """The kernels' files that a printed one may be: by its path where that is printed, else by its name."""
    name = printed.rpartition("/")[2]
    if name in tree.line_names:
        return {tree.line_names[name]}
    files = {file for file in tree.files if file.endswith(".py") and file.rpartition("/")[2] == name}
    if "/" in printed:
        files &= {printed.rpartition(_BELOW)[2]}
    return files


def first_warps(file: str, line: int, kernel: str = "", access: str = "Read", tree: Tree = HOUSE) -> frozenset[str]:
    """The files that a line of an access to shared memory may be of, printed as one of the file.

    The function of the first warps in gl.warp_specialize is compiled into the kernel itself. Triton then gives its
    instructions their line, but the kernel's file. Where another function of the kernel's file has that line, it is the
    first warps' if theirs makes such an access and the other does not. What the kernel does before it shares work out
    is not told apart; of shared memory it only initialises mbarriers, which no race is reported of. The kernel's own
    first line is what an instruction has to which the compiler gives none.
    """
    at = tree.at(file, line)
    entries = tree.entries(kernel) or ([at] if at else [])
    own = [entry for entry in entries if entry.file == file]
    return frozenset(each for entry in own for each in _first_warps(entry, at, line, access, tree)) or frozenset({file})


def _first_warps(entry: Definition, at: Definition | None, line: int, access: str, tree: Tree) -> set[str]:
    files = {tree.definitions[name].file for name in entry.first_warps}
    if at == entry:
        is_theirs = line != entry.first
    elif at is None or at.name not in tree.reached(entry):
        is_theirs = True
    else:
        makes = _MAKES.get(access)
        told = {file for file in files if makes and makes.search(place(file, line, tree)[1])}
        files, is_theirs = told, not (makes and makes.search(place(entry.file, line, tree)[1]))
    return files if files and is_theirs else {entry.file}


# a function of CUDA C++ as this project writes it: a line that opens a parameter list and begins at the left margin, or
# is a member's
_CUDA_FUNCTION = re.compile(
    r"^(?:\s+(?:template <[^>]*> )?(?:static )?HF_DEVICE\s|(?!\s|#|//|\*))(?:[^=;]*?\s)?\*?(\w+)\("
)


@cache
def _lines(file: str, tree: Tree) -> list[str]:
    return (tree.root / file).read_text(encoding="utf-8").splitlines() if file in tree.files else []


@cache
def _functions(file: str, tree: Tree) -> tuple[tuple[int, int, str], ...]:
    """First and last line and name of each function of a Python file, inner ones after outer ones."""
    if not file.endswith(".py"):
        return ()
    parsed = ast.parse("\n".join(_lines(file, tree)))
    spans = [(f.lineno, f.end_lineno or f.lineno, f.name) for f in ast.walk(parsed) if isinstance(f, ast.FunctionDef)]
    return tuple(sorted(spans))


def place(file: str, line: int, tree: Tree = HOUSE) -> tuple[str, str]:
    """The function that a line stands in and the line's text, spaces made one: what survives other lines' moves."""
    if _OR in file:
        return "", AMBIGUOUS
    lines = _lines(file, tree)
    text = " ".join(lines[line - 1].split()) if 0 < line <= len(lines) else ""
    inside = [name for first, last, name in _functions(file, tree) if first <= line <= last]
    if inside:
        return inside[-1], text
    for above in reversed(lines[:line] if file.endswith((".cu", ".cuh")) else []):
        if found := _CUDA_FUNCTION.match(above):
            return found[1], text
    return "", text


def stands(file: str, function: str, text: str, tree: Tree = HOUSE) -> bool:
    """Whether that function of that file still has a line of that text."""
    return any(place(file, n, tree) == (function, text) for n in range(1, len(_lines(file, tree)) + 1))
