"""The source distribution of mlx-recurrence 0.3.0, from the package index: its tests are in no wheel."""

import ast
import subprocess
import sys
import tarfile
from pathlib import Path

VERSION = "0.3.0"
SHA256 = "23ee37e6abd8d6e373c393a28444801d176fa6bbd94c2c9949e902f902e772c7"


def unpacked(folder: Path) -> Path | None:
    """Its folder, below the one given; None where the index has it not, or is not to be reached."""
    wanted = folder / "wanted.txt"
    wanted.write_text(f"mlx-recurrence=={VERSION} --hash=sha256:{SHA256}\n")
    options = ["--quiet", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--require-hashes"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", folder, "-r", wanted]
    if subprocess.run(command, capture_output=True).returncode:
        return None
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def public_names(package: Path) -> dict[str, set[str]]:
    """Of each module, what it defines or imports from the package, by reading its source."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        names = set()
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.ImportFrom) and node.level:
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.Assign):
                names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        place = path.relative_to(package).with_suffix("").parts
        found[".".join(part for part in place if part != "__init__")] = names - {"__all__"}
    return found
