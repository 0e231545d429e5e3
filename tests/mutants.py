"""`make mutants`: plants small faults on changed lines, one at a time, and says which of them no test notices.

Cosmic Ray makes them: it edits text, so that functions of Triton and Gluon, which are compiled from their source, are
changed like any other. Faults are planted in a copy of the checkout, under the tests nearest to the file: those that
import it, or else import what imports it, and so on.
"""

import argparse
import ast
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import unified_diff
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Of Cosmic Ray's operators those whose faults a test should notice, each pair in both directions.
SWAPS = {
    "BinaryOperator": ["Add_Sub", "Sub_Add", "Mul_Add", "FloorDiv_Mul", "Mod_FloorDiv", "Div_Mul", "BitAnd_BitOr"],
    "ComparisonOperator": ["Lt_LtE", "LtE_Lt", "Gt_GtE", "GtE_Gt", "Eq_NotEq", "NotEq_Eq", "Is_IsNot", "IsNot_Is"],
}
# What holds more than imports say: of a folder's files, tests to run beside the nearest. Peers are imported by name.
ALSO = {
    "src/holdfast/planner": ["tests/test_said_out.py"],
    "src/holdfast/planner/candidate.py": ["tests/planner/test_recorded_plans.py"],
    "src/holdfast/planner/kernel_model.py": ["tests/planner/test_recorded_plans.py"],
    "src/holdfast/planner/report.py": ["tests/planner/test_kernel_model.py"],
    "src/holdfast/planner/movement": [
        "tests/planner/test_movement.py",
        "tests/planner/test_prediction.py",
        "tests/planner/test_recorded_plans.py",
    ],
    "src/holdfast/planner/constrint": [
        "tests/planner/test_constrint_strength.py",
        "tests/planner/test_constrint_oracles.py",
        "tests/planner/test_constrint_small.py",
    ],
    "src/holdfast/planner/models": ["tests/planner/test_recorded_plans.py"],
    "src/holdfast/ops": [
        "tests/test_house.py",
        "tests/ops/test_dry_runs.py",
        "tests/ops/test_one_gradient.py",
        "tests/ops/test_problems.py",
        "tests/ops/test_signatures.py",
        "tests/ops/test_wrong_kinds.py",
        "tests/test_strides.py",
    ],
    "src/holdfast/kernels/dense/torch": ["tests/ops/test_dense.py"],
    "src/holdfast/kernels/matrix/scalar_decay/hopper": [
        "tests/kernels/matrix/scalar_decay/hopper/test_one_chunk.py",
        "tests/kernels/matrix/scalar_decay/hopper/onchip/test_kernel.py",
    ],
    "src/holdfast/kernels": [
        "tests/test_house.py",
        "tests/kernels/test_launched_warps.py",
        "tests/sanitize/test_recorded_launches.py",
    ],
    "src/holdfast/integrations": ["tests/integrations/test_signatures.py"],
    "src/holdfast/nn": ["tests/nn/test_starting_values.py"],
    "src/holdfast/ops/checks.py": ["tests/cli/test_doctor.py"],
    "src/holdfast/ops/delta_inputs.py": ["tests/ops/test_delta_layer.py"],
    "src/holdfast/ops/dense.py": ["tests/ops/test_dense_errors.py"],
    "src/holdfast/ops/diagonal.py": ["tests/ops/test_diagonal_errors.py"],
    "src/holdfast/ops/explain.py": ["tests/ops/test_explain_calls.py"],
    "src/holdfast/ops/kda_layer.py": ["tests/nn/test_mixers.py"],
    "src/holdfast/ops/gla_layer.py": ["tests/nn/test_gla.py"],
    "src/holdfast/ops/inter_chunk_scan.py": ["tests/ops/test_chunk_errors.py"],
    "src/holdfast/ops/intra_chunk.py": ["tests/ops/test_chunk_errors.py"],
    "src/holdfast/ops/layer_step_checks.py": ["tests/ops/test_checks.py"],
    "src/holdfast/kernels/slots.py": ["tests/ops/test_pooled_prefill.py", "tests/ops/test_pooled_step.py"],
    "src/holdfast/ops/pooled_matrix.py": ["tests/ops/test_pooled_step.py", "tests/ops/test_pooled_mlstm.py"],
    "src/holdfast/ops/pooled_step_checks.py": ["tests/ops/test_checks.py"],
    "src/holdfast/ops/prefill_pieces.py": ["tests/ops/test_pooled_prefill.py"],
    "src/holdfast/ops/slot_checks.py": [
        "tests/ops/test_pooled_mlstm.py",
        "tests/ops/test_pooled_prefill.py",
        "tests/ops/test_pooled_step.py",
    ],
    "src/holdfast/ops/span_call.py": ["tests/parallel/test_summary.py"],
    "src/holdfast/recurrences/summary.py": ["tests/parallel/test_summary.py"],
    "src/holdfast/ops/mamba2_layer.py": ["tests/nn/test_mamba2.py"],
    "src/holdfast/ops/mlstm_layer.py": ["tests/nn/test_mlstm.py", "tests/ops/test_mixer_layers.py"],
    "src/holdfast/cli": ["tests/test_said_out.py", "tests/cli/test_defaults.py"],
    "src/holdfast/cli/doctor.py": ["tests/cli/test_fuzz.py"],
    "src/holdfast/cli/train.py": ["tests/cli/test_command.py"],
    "src/holdfast/ops/rotary.py": ["tests/kernels/rotary/test_rotary.py", "tests/ops/test_mixer_layers.py"],
    "src/holdfast/ops/self_check.py": ["tests/ops/test_checks.py"],
    "src/holdfast/ops/soft_cap.py": ["tests/kernels/soft_cap/test_soft_cap.py", "tests/ops/test_mixer_layers.py"],
    "src/holdfast/ops/step.py": ["tests/ops/test_delta_options.py", "tests/ops/test_mamba1.py"],
    "src/holdfast/ops/verify.py": ["tests/ops/test_checks.py"],
    "src/holdfast/cli/bench_command.py": ["tests/cli/bench/test_bench_command.py", "tests/cli/bench/test_live.py"],
    "src/holdfast/cli/bench/peers": ["tests/cli/bench/test_measure.py", "tests/cli/bench/test_peers.py"],
}
OPERATORS = [f"core/Replace{kind}_{swap}" for kind, swaps in SWAPS.items() for swap in swaps]
OPERATORS += [f"core/Replace{swap}" for swap in ("TrueWithFalse", "FalseWithTrue", "AndWithOr", "OrWithAnd")]
OPERATORS += ["core/ReplaceUnaryOperator_Delete_USub", "core/ReplaceUnaryOperator_Delete_Not", "core/NumberReplacer"]


# pytest's status where none was chosen
NO_TESTS = 5


@dataclass(frozen=True)
class Fault:
    """The occurrence-th place in a file, a path from the root, where an operator applies."""

    path: str
    line: int
    operator: str
    occurrence: int


def git(*arguments: str) -> list[str]:
    said = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return said.stdout.splitlines()


def changed_lines(base: str) -> dict[str, set[int]]:
    """File in src -> lines that differ from where this branch left base, in the working tree; of a new file all."""
    (fork,) = git("merge-base", base, "HEAD")
    found: dict[str, set[int]] = {}
    lines: set[int] = set()
    for line in git("diff", "--unified=0", "--no-ext-diff", "--no-color", fork, "--", "src"):
        if line.startswith("+++ "):
            lines = found.setdefault(line.removeprefix("+++ b/"), set()) if line.endswith(".py") else set()
        elif at := re.match(r"@@ \S+ \+(\d+)(?:,(\d+))? @@", line):
            first, count = int(at[1]), int(at[2] or 1)
            lines |= set(range(first, first + count))
    for path in git("ls-files", "--others", "--exclude-standard", "--", "src"):
        if path.endswith(".py"):
            found[path] = all_lines(path)
    return found


def all_lines(path: str) -> set[int]:
    return set(range(1, 1 + len((ROOT / path).read_text(encoding="utf-8").splitlines())))


def operator_of(name: str) -> Any:
    from cosmic_ray.plugins import get_operator

    return get_operator(name)()


def faults_of(path: str, lines: set[int]) -> Iterator[Fault]:
    from cosmic_ray.ast import ast_nodes, get_ast_from_path

    tree = get_ast_from_path(ROOT / path)
    text = (ROOT / path).read_text(encoding="utf-8").splitlines()
    for name in OPERATORS:
        operator = operator_of(name)
        places = (start for node in ast_nodes(tree) for start, _ in operator.mutation_positions(node))
        for occurrence, (line, column) in enumerate(places):
            # zip's strict is an assertion, without which nothing changes where it holds
            if line in lines and not text[line - 1][:column].endswith(", strict="):
                yield Fault(path, line, name, occurrence)


def imports_of(path: Path) -> set[str]:
    """Dotted names that a file imports or has in a string of dots, as `interpret` takes a module's name."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    place = path.relative_to(ROOT).with_suffix("").parts[1:]
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = [*(place[: -node.level] if node.level else ()), *(node.module or "").split(".")]
            name = ".".join(part for part in package if part)
            found |= {name, *(f"{name}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count(".") < 6:
            found.add(node.value)
    return found


def nearest_tests(path: str) -> list[str]:
    """Test files that import a file of src, or the nearest that import it through others; and the one of its name.

    Of several those in the folder that mirrors the file's; where none of the nearest is there, the nearest that is too.
    And what ALSO names.
    """
    imports = {file: imports_of(file) for folder in ("src", "tests") for file in sorted((ROOT / folder).rglob("*.py"))}
    folder = Path("tests", *Path(path).parts[2:-1])
    own = folder / f"test_{Path(path).stem}.py"
    named = {str(own)} if (ROOT / own).exists() else set()
    also = {test for place, tests in ALSO.items() if path.startswith(place) for test in tests}
    seen, level = {ROOT / path}, {ROOT / path}
    nearest: set[str] = set()
    while level:
        names = {".".join(file.relative_to(ROOT).with_suffix("").parts[1:]).removesuffix(".__init__") for file in level}
        level = {file for file, found in imports.items() if found & names} - seen
        seen |= level
        # here tests of a GPU are left out, so that a file of nothing else is near to no fault
        tests = {
            file.relative_to(ROOT)
            for file in level
            if file.name.startswith("test_")
            and "\npytestmark = pytest.mark.gpu\n" not in file.read_text(encoding="utf-8")
        }
        inside = {str(file) for file in tests if file.parent == folder}
        if inside or named:
            return sorted(inside | (nearest or {str(file) for file in tests if not inside}) | named | also)
        nearest = nearest or {str(file) for file in tests}
    return sorted(nearest | also)


class Copy:
    """A copy of the working tree, in which tests run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in git("ls-files", "--cached", "--others", "--exclude-standard"):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)

    def passes(self, tests: list[str], tier: str, options: list[str], seconds: float | None = None) -> bool:
        """Whether the tests of a tier pass, in time, and where there are none. A process that a signal ended, as a
        compiler's assertion does, did not."""
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", f"not gpu and {tier}"]
        # whole: a test that works in another folder starts processes that would import the installed package
        environment = {"PYTHONPATH": str(self.folder / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            given = ["env", *(f"{name}={value}" for name, value in environment.items()), *command, *options, *tests]
            done = subprocess.run(given, cwd=self.folder, capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            return False
        if done.returncode > 2 and done.returncode != NO_TESTS:
            raise SystemExit(f"pytest: {done.stdout}{done.stderr}")
        return done.returncode in (0, NO_TESTS)

    def with_fault(self, fault: Fault) -> str | None:
        """Plants it, and returns what it changed; None where that is nothing."""
        from cosmic_ray.mutating import mutate_code

        sound = (ROOT / fault.path).read_text(encoding="utf-8")
        broken = mutate_code(sound, operator_of(fault.operator), fault.occurrence)
        if broken is None or broken == sound:
            return None
        (self.folder / fault.path).write_text(broken, encoding="utf-8")
        return "\n".join(unified_diff(sound.splitlines(), broken.splitlines(), fault.path, fault.path, "", "", 1, ""))

    def mend(self, fault: Fault) -> None:
        shutil.copy2(ROOT / fault.path, self.folder / fault.path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Plants small faults, and says which of them no test notices.")
    parser.add_argument(
        "files", nargs="*", help="files and folders of src, all of whose lines count; without, the changed lines"
    )
    parser.add_argument("--base", default="main", help="branch that changes are counted from")
    parser.add_argument("--most", type=int, default=20, help="faults to plant at most, drawn from all")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--tests", nargs="+", help="tests to run, in place of the nearest")
    parser.add_argument("-k", default="", help="pytest's: of these tests those alone")
    asked = parser.parse_args()
    files = [
        file for path in map(Path, asked.files) for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])
    ]
    lines = {str(path): all_lines(path) for path in files} or changed_lines(asked.base)
    faults = [fault for path, which in sorted(lines.items()) for fault in faults_of(path, which)]
    drawn = sorted(
        random.Random(asked.seed).sample(faults, min(asked.most, len(faults))), key=lambda each: (each.path, each.line)
    )
    print(f"{len(drawn)} of {len(faults)} faults on {sum(map(len, lines.values()))} lines of {len(lines)} files")
    options = ["-k", asked.k] if asked.k else []
    missed = tried = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder))
        tests: dict[str, list[str]] = {}

        @cache
        def limit(path: str, tier: str) -> float:
            """Seconds for a path's tests, which have to pass without a fault."""
            started = time.monotonic()
            if not copy.passes(tests[path], tier, options):
                raise SystemExit(f"{path}: {' '.join(tests[path])} fail without a fault")
            return 60 + 5 * (time.monotonic() - started)

        def is_noticed(fault: Fault, tier: str) -> bool:
            seconds = limit(fault.path, tier)
            copy.with_fault(fault)
            passed = copy.passes(tests[fault.path], tier, options, seconds)
            copy.mend(fault)
            return not passed

        for fault in drawn:
            path = fault.path
            if path not in tests:
                tests[path] = asked.tests or nearest_tests(path)
            changed = copy.with_fault(fault)
            copy.mend(fault)
            if changed is None:
                continue
            tried += 1
            # the slow ones for what the others let through
            noticed = bool(tests[path]) and any(is_noticed(fault, tier) for tier in ("not slow", "slow"))
            missed += not noticed
            print(f"{'noticed' if noticed else 'MISSED '} {path}:{fault.line}", flush=True)
            if not noticed:
                print(f"{changed}\nby {' '.join(tests[path]) or 'no test'}", flush=True)
    print(f"{tried - missed} of {tried} noticed")
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
