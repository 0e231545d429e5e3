"""Compiles CUDA files for sm_90 with NVRTC, without a GPU; prints the name of each and the bytes that it spills."""

import io
import re
import sys
from pathlib import Path

from cuda.core import Program, ProgramOptions

OPTIONS = ProgramOptions(std="c++17", arch="sm_90", ptxas_options="-v")

for path in map(Path, sys.argv[1:]):
    log = io.StringIO()
    Program(path.read_text(), "c++", OPTIONS).compile("cubin", logs=log)
    print(path.stem, sum(map(int, re.findall(r"(\d+) bytes spill", log.getvalue()))), sep=" spills ")
    assert re.search(r"Used \d+ registers", log.getvalue()), f"the compiler reports no registers: {log.getvalue()}"
