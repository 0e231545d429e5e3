"""Tokens a second, use of the peak and memory of a training."""

import pytest
import torch

from holdfast.cli.throughput import Throughput

CPU = torch.device("cpu")


def after(*seconds, peak=None, device=CPU):
    found = Throughput(1000, 300, peak, device)
    for each in seconds:
        found.add(each)
    return found


def test_the_first_step_counts_only_while_it_is_alone():
    assert after(8.0).tokens_per_second == pytest.approx(125)
    assert after(8.0, 0.5).tokens_per_second == pytest.approx(2000)
    assert after(8.0, 0.5, 1.5).tokens_per_second == pytest.approx(1000)
    assert after(8.0, 1.0, 0.25, 0.25).summary() == "median step 0.250 s  2,000 tokens/s"
    assert after(8.0).summary() == "median step 8.000 s  125 tokens/s"
    assert after().summary() == ""


def test_what_is_not_known_is_left_out():
    found = after(1.0, 1.0)
    assert (found.said(), found.utilisation, found.memory) == ("1,000 tokens/s", None, None)
    assert found.scalars() == {"tokens_per_second": 1000}


def test_use_of_the_peak_and_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 2**29)
    found = after(9.0, 1.0, peak=1e6, device=torch.device("cuda", 0))
    assert found.said() == "1,000 tokens/s  30.0% MFU  1.50 GiB"
    assert found.scalars() == {"tokens_per_second": 1000, "mfu": pytest.approx(0.3), "memory_bytes": 3 * 2**29}
