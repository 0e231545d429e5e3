"""Processes that are the ranks of one group on this machine, kept for many cases."""

import multiprocessing
import os
import runpy
import socket
import tempfile
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

# seconds that a case may take, and that a rank waits for another
PATIENCE = 60

# processes are forked off one that has imported all this, and in which nothing has run
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch.distributed.fsdp", "torch._inductor.config", "holdfast.nn", "holdfast.parallel"])


class Pool:
    """size processes, one rank each of a group: of gloo, or of NCCL with a GPU each."""

    def __init__(self, size: int, patience: float = PATIENCE, ends: bool = False, backend: str = "gloo") -> None:
        """patience: seconds that a rank waits for another. ends: a process ends with the first case that it fails."""
        self.size = size
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        pipes = [CONTEXT.Pipe() for _ in range(size)]
        self._pipes = [ours for ours, _ in pipes]
        self.processes = [
            CONTEXT.Process(target=_serve, args=(theirs, rank, size, store, patience, ends, backend), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self.processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()

    def run(self, case: Callable[..., Any], *arguments: Any) -> list[Any]:
        """case(rank, size, *arguments) on every rank. Returns what each did; AssertionError with all that was raised.

        case: a function of an importable module.
        """
        found = self.outcomes(case, *arguments)
        failed = [f"rank {rank}: {said}" for rank, (good, said) in enumerate(found) if not good]
        assert not failed, "\n".join(failed)
        return [result for _, result in found]

    def outcomes(self, case: Callable[..., Any], *arguments: Any) -> list[tuple[bool, Any]]:
        """As `run`, but of each rank whether it ended well, and its result or what it raised; a rank that died gives
        "gone"."""
        for pipe in self._pipes:
            pipe.send((case, arguments))
        found = []
        for pipe in self._pipes:
            try:
                found.append(pipe.recv() if pipe.poll(2 * PATIENCE) else (False, "no answer"))
            except EOFError:
                found.append((False, "gone"))
        return found

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()


def run_script(size: int, script: Path) -> str:
    """What a script prints, run by size processes that find one another as torchrun lets them, all to a good end."""
    printed, statuses = end_of_script(size, script)
    assert statuses == [0] * size, printed
    return printed


def end_of_script(size: int, script: Path) -> tuple[str, list[int | None]]:
    """As `run_script`, whatever the end: what was printed, and each process's exit status."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    said = [script.with_suffix(f".{rank}") for rank in range(size)]
    processes = [
        CONTEXT.Process(target=_run_script, args=(script, said[rank], rank, size, port)) for rank in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(2 * PATIENCE)
    return "\n".join(path.read_text() for path in said), [process.exitcode for process in processes]


def _run_script(script: Path, said: Path, rank: int, size: int, port: int) -> None:
    torch.set_num_threads(1)
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in ranks.items()})
    os.environ["TORCHELASTIC_RUN_ID"] = "none"
    with said.open("w") as file, redirect_stdout(file), redirect_stderr(file):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit:
            raise
        except BaseException:
            traceback.print_exc()
            raise


def _serve(pipe: Any, rank: int, size: int, store: str, patience: float, ends: bool, backend: str) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    timeout = timedelta(seconds=patience)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, rank=rank, world_size=size, init_method=f"file://{store}", timeout=timeout)
    while True:
        try:
            case, arguments = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            pipe.send((True, case(rank, size, *arguments)))
        # of pytest's own, which is no Exception, a case may raise what did not raise
        except (Exception, pytest.fail.Exception):
            pipe.send((False, traceback.format_exc()))
            if ends:
                return
