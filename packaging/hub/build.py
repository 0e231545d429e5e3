"""A tree for the Kernel Hub: `python packaging/hub/build.py OUT`, then `kernels.get_local_kernel(Path(OUT))`.

The hub's library loads a folder by a name of its own, beside whatever is installed. So the package's imports become
relative, and its operators take that name. Kernels are compiled where they run, so one tree serves every GPU, and CPUs.
"""

import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src/holdfast"
# the command line and its fuzzer, what other packages' call sites and Apple's chips are served by
LEFT_OUT = ("cli", "fuzz", "integrations", "mlx", "__main__.py")
# noarch builds, one for each backend of the hub's library
VARIANTS = ("cpu", "cuda")
_FROM = re.compile(r"^(\s*)from holdfast(?:\.([\w.]+))? import ", re.M)


def relative(text: str, depth: int) -> str:
    """A module's text with its imports of the package made relative. depth: of its folder below the package."""
    return _FROM.sub(lambda found: f"{found[1]}from {'.' * (depth + 1)}{found[2] or ''} import ", text)


def build(out: Path) -> None:
    """Raises FileExistsError where there is something at OUT/build."""
    files = sorted(
        path
        for path in SOURCE.rglob("*")
        if path.is_file() and path.relative_to(SOURCE).parts[0] not in LEFT_OUT and "__pycache__" not in path.parts
    )
    texts = {}
    for path in files:
        place = path.relative_to(SOURCE)
        text = path.read_text(encoding="utf-8")
        texts[place] = relative(text, len(place.parts) - 1) if path.suffix == ".py" else text
    texts[Path("layers.py")] = (Path(__file__).parent / "layers.py").read_text(encoding="utf-8")
    texts[Path("__init__.py")] += "\nfrom . import layers  # noqa: E402, F401 - the hub's library looks for it\n"
    made = hashlib.sha256("".join(f"{place}\0{text}\0" for place, text in texts.items()).encode()).hexdigest()[:8]
    version = re.search(r'^__version__ = "(\d+)\.', texts[Path("__init__.py")], re.M)[1]
    (out / "build").mkdir(parents=True)
    for backend in VARIANTS:
        folder = out / "build" / f"torch-{backend}"
        for place, text in texts.items():
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            (folder / place).write_text(text, encoding="utf-8")
        metadata = {"id": f"holdfast_{backend}_{made}", "name": "holdfast", "version": int(version), "license": "MIT"}
        metadata |= {"python-depends": [], "backend": {"type": backend}}
        (folder / "metadata.json").write_text(json.dumps(metadata, indent=1) + "\n")
    shutil.copy(ROOT / "LICENSE", out)
    shutil.copy(Path(__file__).parent / "README.md", out)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python packaging/hub/build.py OUT")
    build(Path(sys.argv[1]))
