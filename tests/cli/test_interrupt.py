"""The first Ctrl-C waits for the end of a step; the second does not wait."""

import signal

import pytest

from holdfast.cli import checkpoint, train_lm, train_parity
from holdfast.cli.interrupt import Interrupt
from holdfast.cli.parity import ParityModel
from holdfast.cli.train_lm import train_language_model
from holdfast.cli.train_parity import ParityConfig

SETTINGS = {"mixer": "gla", "layers": 1, "width": 16, "heads": 2, "length": 16, "batch": 2, "steps": 9, "save_every": 3}


class Ended(BaseException):
    """What the handler that was there before raises."""


@pytest.fixture
def before():
    """Handlers of a caller's own, which are there again at the end."""

    def end(number, frame):
        raise Ended(number)

    handlers = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    yield end
    for number, handler in handlers.items():
        assert signal.signal(number, handler) is end


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_the_first_is_noted_and_the_second_acts_as_usual(before, first, second):
    with Interrupt() as interrupt:
        assert interrupt.signal is None
        signal.raise_signal(first)
        assert interrupt.signal == first
        assert interrupt.exit_code == 128 + first
        with pytest.raises(Ended, match=str(int(second))):
            signal.raise_signal(second)


def test_handlers_come_back_also_where_none_was_sent_or_an_error_was_raised(before):
    with Interrupt():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(ValueError, match="inside"), Interrupt():
        raise ValueError("inside")
    assert signal.getsignal(signal.SIGINT) is before


@pytest.fixture
def pythons_own():
    """Python's handler of Ctrl-C, which a process that was started in the background does not have."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.mark.usefixtures("pythons_own")
def test_a_second_control_c_ends_training_at_once_with_the_last_checkpoint(tmp_path, text_file, monkeypatch):
    taken = []

    def twice(training):
        taken.append(training.step)
        if training.step == 4:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return take(training)

    take = train_lm.Training.train_step
    monkeypatch.setattr(train_lm.Training, "train_step", twice)
    with pytest.raises(KeyboardInterrupt):
        train_language_model(SETTINGS | {"text": str(text_file)}, {}, "cpu", tmp_path / "a")
    assert taken == [0, 1, 2, 3, 4]
    assert checkpoint.load(tmp_path / "a")["step"] == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_parity_stops_after_the_step(monkeypatch, capsys, number):
    calls = []

    class Model(ParityModel):
        def forward(self, bits):
            calls.append(bits)
            if len(calls) == 2:
                signal.raise_signal(number)
            return super().forward(bits)

    monkeypatch.setattr(train_parity, "ParityModel", Model)
    config = ParityConfig(mixer="gla", width=8, steps=5, batch=2)
    assert train_parity.train_parity(config, "cpu") == 128 + number
    assert len(calls) == 2
    out = capsys.readouterr().out
    assert "stopped at step 2 of 5" in out
    assert "extrapolation" not in out


def test_without_a_signal_the_status_is_that_of_none():
    assert Interrupt().exit_code == 128
