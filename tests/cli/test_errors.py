"""Mistakes and machines in one line each."""

import errno
import os

import pytest
import torch

from holdfast.cli.device import choose_device, explained_memory_errors
from holdfast.cli.errors import UserError, one_line, reason
from holdfast.cli.sizes import sizes_of


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_called_one(number):
    assert reason(OSError(number, "whatever")) == f"no space left ({os.strerror(number)})"


def test_the_systems_own_words():
    assert reason(OSError(errno.EACCES, "Permission denied", "a/b")) == "Permission denied"
    assert reason(OSError("odd")) == "odd"
    assert reason(OSError()) == "OSError"


def test_errors_on_one_line():
    assert one_line(OSError(errno.EACCES, "Permission denied", "a/b")) == "a/b: Permission denied"
    assert one_line(OSError(errno.EACCES, "Permission denied")) == "Permission denied"
    assert one_line(OSError("odd\nthing")) == "odd thing"
    assert one_line(ValueError("x: expected 1;\n  got  2")) == "x: expected 1; got 2"
    assert one_line(KeyError()) == "KeyError"


def test_the_device_is_the_first_gpu_or_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device("auto") == torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == torch.device("cpu")
    assert choose_device("cpu") == torch.device("cpu")
    with pytest.raises(UserError, match="--device meta: holds no data to work on"):
        choose_device("meta")


@pytest.mark.parametrize(
    ("error", "said"),
    [(RuntimeError("no driver\nCompile with DSA"), "no driver"), (AssertionError(), "AssertionError")],
)
def test_of_a_devices_error_the_first_line_is_told(monkeypatch, error, said):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(torch, "empty", fail)
    with pytest.raises(UserError, match=f"^--device cpu: not usable here: {said}$"):
        choose_device("cpu")


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("CUDA"), RuntimeError("[enforce] can't allocate memory: 8 bytes")]
)
def test_memory_that_runs_out_is_explained(error):
    with (
        pytest.raises(UserError, match="out of memory: try a smaller --batch"),
        explained_memory_errors("try a smaller --batch"),
    ):
        raise error


def test_other_errors_stay_as_they_are():
    with pytest.raises(RuntimeError, match="shapes"), explained_memory_errors("try less"):
        raise RuntimeError("shapes differ")


def test_sizes():
    assert sizes_of(" B=4, T = 4096,K=0,") == {"B": 4, "T": 4096, "K": 0}
    assert sizes_of("") == {}


@pytest.mark.parametrize("shape", ["B", "=4", "B=", "B=-1", "B=1.5", "B=²", "B=4=5"])
def test_what_is_no_size(shape):
    with pytest.raises(ValueError, match="--shape: expected AXIS=SIZE"):
        sizes_of(shape)
