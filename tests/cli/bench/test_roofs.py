"""The roofs of a device: how much is copied and multiplied for them, and what that comes to."""

from types import SimpleNamespace

import pytest
import torch

from holdfast.cli.bench import roofs as measured

CPU = torch.device("cpu")


@pytest.fixture
def made(monkeypatch):
    """Shapes of what is made, on meta, by dtype; every run takes 4 ms."""
    found = []
    monkeypatch.setattr(measured, "time_runs", lambda run, device: run() is not None and SimpleNamespace(median_ms=4.0))
    kept = ("uint8", "float32", "bfloat16", "empty_like", "device")
    kept += ("get_float32_matmul_precision", "set_float32_matmul_precision")
    stand_in = SimpleNamespace(**{name: getattr(torch, name) for name in kept})
    for name, make in (("ones", torch.ones), ("randn", torch.randn)):

        def noted(*shape, dtype, device, make=make):
            found.append((dtype, shape))
            return make(*shape, dtype=dtype, device="meta")

        setattr(stand_in, name, noted)
    monkeypatch.setattr(measured, "torch", stand_in)
    return found


@pytest.mark.parametrize(("device", "copied", "side"), [("cpu", 2**28, 1024), ("cuda", 2**31, 8192)])
def test_what_fills_a_device(made, device, copied, side):
    found = measured.roofs(torch.device(device))
    assert (found.copy_bytes, found.matrix_size) == (copied, side)
    # half is read and half written
    assert made[0] == (torch.uint8, (copied // 2,))
    assert found.copy_bandwidth == pytest.approx(copied / 4e-3)
    assert found.rates == pytest.approx(dict.fromkeys(("bfloat16", "float32"), 2 * side**3 / 4e-3))


def test_products_are_without_tf32_and_what_was_set_is_set_again(made):
    torch.set_float32_matmul_precision("high")
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        timed = measured.time_runs
        patch.setattr(
            measured,
            "time_runs",
            lambda run, device: seen.append(torch.get_float32_matmul_precision()) or timed(run, device),
        )
        try:
            measured.roofs(CPU, 64, 8)
            assert torch.get_float32_matmul_precision() == "high"
        finally:
            torch.set_float32_matmul_precision("highest")
    assert seen == ["high", "highest", "highest"]
