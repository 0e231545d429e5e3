"""What the suite of whole models measures: figures of given times, and what each run is made of."""

import json
import re
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from holdfast import nn as hnn
from holdfast.cli.bench.clock import Times
from holdfast.cli.bench.models import check as checking
from holdfast.cli.bench.models import decoding, host, layers, mixers, training, warm
from holdfast.cli.bench.models.attention import Attention
from holdfast.cli.bench.models.check import check
from holdfast.cli.bench.models.decoding import decode_step, decoding_rows, measure_decoding
from holdfast.cli.bench.models.host import host_rows, measure_host
from holdfast.cli.bench.models.layers import layer_rows, measure_layer, op_alone
from holdfast.cli.bench.models.mixers import MIXERS, Mixer
from holdfast.cli.bench.models.model import Model, make_model, training_step
from holdfast.cli.bench.models.row import Row
from holdfast.cli.bench.models.scale import FULL, SMALL
from holdfast.cli.bench.models.training import measure_training, training_rows
from holdfast.cli.language_model import TorchLikeMixer

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
MIXER = {mixer.name: mixer for mixer in MIXERS}
ATTENTION = MIXER["attention"]
TIMES = Times(4.0, 3.0, 8.0, 5, "by hand")


class Linear(nn.Module):
    """A mixer of one matrix, beside a weight that nothing reads."""

    def __init__(self, width):
        super().__init__()
        self.proj, self.unread = nn.Linear(width, width, bias=False), nn.Parameter(torch.ones(1))

    def forward(self, x, state=None):
        return self.proj(x), (torch.zeros(1),)


def with_infinity(layer):
    """In one element of the first matrix."""
    next(p for p in layer.parameters() if p.dim() == 2).data[0, 0] = torch.inf
    return layer


def simple(make=Linear, **fields):
    return Mixer("simple", lambda width, head, narrow: make(width), **fields)


@pytest.mark.parametrize("length", [1, 2, 7])
def test_attention_is_that_of_the_tokens_so_far(length):
    layer, x = Attention(8, 2).double(), torch.randn(3, length, 8, dtype=torch.float64)
    q, k, v = (part.view(3, length, 2, 4) for part in layer.qkv_proj(x).split(8, -1))
    scores = torch.einsum("bthd,bshd->bhts", q, k) / 2
    shares = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf).softmax(-1)
    y, (keys, _, _) = layer(x)
    torch.testing.assert_close(y, layer.out_proj(torch.einsum("bhts,bshd->bthd", shares, v).flatten(2)))
    assert keys.shape == (3, 2, length, 4)


def test_rows_of_decoding_and_of_the_host_have_their_sizes():
    """12 layers of width 1024 at batches of 1 and 64; 2 x 512 tokens of width 768."""
    rows = decoding_rows(MIXER["gla"], FULL, CUDA)
    assert [(row.mode, row.sizes) for row in rows] == [
        (mode, {"B": B, "layers": 12, "d": 1024}) for B in (1, 64) for mode in ("eager", "graph")
    ]
    assert [row.mode for row in decoding_rows(MIXER["gla"], FULL, CPU)] == ["eager"] * 2
    rows = host_rows(ATTENTION, FULL)
    assert [row.mode for row in rows] == [
        "op scaled_dot_product_attention", "op causal_conv1d", "op gated_rms_norm", "layer",
    ]  # fmt: skip
    assert all(row.sizes == {"B": 2, "T": 512, "d": 768} for row in rows)
    assert [row.mode for row in host_rows(MIXER["torch lstm"], FULL)] == ["layer"]
    assert [(row.mode, row.sizes) for row in layer_rows(MIXER["gla"], FULL)] == [
        (mode, {"B": 8, "T": 2048, "d": 768}) for mode in ("model", "defaults")
    ]
    assert [row.mode for row in layer_rows(MIXER["rglru"], FULL)] == ["model"]


@pytest.mark.parametrize(
    ("name", "states"),
    [
        # keys and values of 16 tokens in bfloat16; a state of head x head floats for each of 2 heads in 2 layers
        ("attention", 2 * 2 * 16 * 32 * 2),
        ("retnet", 2 * 2 * 16 * 16 * 4),
    ],
)
@pytest.mark.parametrize(("mode", "method"), [("eager", "events"), ("graph", "graph")])
def test_a_step_of_decoding_in_figures(name, states, mode, method, monkeypatch):
    asked = []
    monkeypatch.setattr(decoding, "time_runs", lambda run, device, how: asked.append(how) or TIMES)
    row = replace(decoding_rows(MIXER[name], SMALL, CPU)[1], mode=mode, note="a note")
    found = measure_decoding(MIXER[name], row, SMALL, CPU)
    weights = sum(p.numel() for p in MIXER[name].make(32, 16, 8).parameters())
    # two sequences in 4 ms
    assert found.figures == {
        "step_ms": 4.0, "low_ms": 3.0, "high_ms": 8.0, "tokens_per_s": pytest.approx(500.0),
        "weights_bytes": 2 * 2 * weights, "states_bytes": states * row.sizes["B"],
    }  # fmt: skip
    assert (asked, found.note, found.status) == ([method], "a note; by hand", "ok")


def test_a_step_that_is_not_finite_is_wrong():
    mixer = simple(lambda width: with_infinity(hnn.RGLRU(width)))
    row = Row("decoding", "simple", "eager", {"B": 1})
    assert measure_decoding(mixer, row, SMALL, CPU).status == "wrong"


class OneState(nn.Module):
    """torch's RNN, without a step of its own: its state comes back in other memory."""

    def __init__(self, width):
        super().__init__()
        self.layer = nn.RNN(width, width, batch_first=True)

    def forward(self, x, state=None):
        return self.layer(x, state)


@pytest.mark.parametrize("make", [OneState, lambda width: TorchLikeMixer(hnn.LSTM, width, 2)])
def test_states_of_layers_without_a_step_go_on_too(make):
    stack, x = [make(8), make(8)], torch.randn(1, 6, 8)
    with torch.no_grad():
        y, states = x[:, :4], []
        for layer in stack:
            out, state = layer(y)
            y = y + out
            states.append(state)
        token = x[:, 4:5].clone()
        run = decode_step(stack, token, states)
        first = run()
        token.copy_(x[:, 5:])
        for layer in stack:
            x = x + layer(x)[0]
        torch.testing.assert_close(torch.cat([first, run()], 1), x[:, 4:], rtol=1e-4, atol=1e-5)


@pytest.fixture
def passes(monkeypatch):
    """Functions and inputs of which the host time is taken, by the op's name or "layer"; each for 4 ms."""
    found = {}
    monkeypatch.setattr(host, "one_pass", lambda call, inputs, grad: found.update(call=call, inputs=inputs, grad=grad))
    monkeypatch.setattr(host, "both_passes", lambda layer, x: found.update(layer=layer, x=x))
    monkeypatch.setattr(host, "time_calls", lambda *rest: TIMES)
    return found


def test_host_time_of_an_op_is_that_of_the_sizes_inside_a_layer(passes):
    """1 x 8 tokens of width 32: 4 heads of 8 in attention, 2 of 16 elsewhere, a convolution over q, k and v."""
    for name, shapes in {
        "scaled_dot_product_attention": [(1, 4, 8, 8)] * 3,
        "causal_conv1d": [(1, 8, 96), (96, 4)],
        "gated_rms_norm": [(1, 8, 2, 16), (1, 8, 2, 16), (16,)],
    }.items():
        row = measure_host(ATTENTION, Row("host", "attention", f"op {name}", {}), SMALL, CPU)
        inputs = passes["inputs"]
        assert [tuple(x.shape) for x in inputs] == shapes
        assert ({x.dtype for x in inputs}, passes["grad"]) == ({torch.bfloat16}, True)
        assert row.figures == {"host_us": 4000.0, "low_us": 3000.0, "high_us": 8000.0}
        y = passes["call"](inputs)
        assert y.shape == inputs[0].shape
        if len(shapes) == 3 and name.startswith("scaled"):
            # the first token sees itself alone
            torch.testing.assert_close(y[:, :, 0], inputs[2][:, :, 0])
    measure_host(ATTENTION, Row("host", "attention", "layer", {}), SMALL, CPU)
    assert (passes["layer"].num_heads, passes["x"].shape, passes["x"].dtype) == (4, (1, 8, 32), torch.float32)


@pytest.mark.parametrize(
    ("make", "shapes"),
    [
        # i, f, g, o of both at once; heads of 16 by themselves, and the projections around them
        (lambda: TorchLikeMixer(hnn.LSTM, 32, 2), [(1, 32, 128)]),
        (lambda: hnn.RGLRU(32, num_heads=2), [(1, 32, 64), (2, 16, 32), (1, 32, 32)]),
        (lambda: hnn.RetNet(32, num_heads=2, expand_v=1), [(1, 32, 128), (1, 32, 32)]),
    ],
)
def test_projections_are_the_products_of_both_passes(make, shapes):
    made = [tuple(y.shape) for y in layers.projections(make(), 8, CPU)()]
    expected = [
        shape for heads, inputs, outputs in shapes
        for shape in ((heads, 8, outputs), (heads, 8, inputs), (heads, inputs, outputs))
    ]  # fmt: skip
    assert sorted(made) == sorted(expected)


@pytest.mark.parametrize("more", [(), ("state",), ("weights", "cache")])
def test_of_another_librarys_layer_the_output_counts(more, monkeypatch):
    asked = []

    class Layer(nn.Module):
        def __init__(self, **sizes):
            super().__init__()
            asked.append(sizes)

        def forward(self, x):
            return (2 * x, *more) if more else 2 * x

    monkeypatch.setattr(mixers, "lift_refusal", lambda: asked.append("lifted"))
    monkeypatch.setattr(mixers, "import_module", {"fla.layers": SimpleNamespace(GLA=Layer)}.__getitem__)
    y, state = mixers._fla("GLA", hidden_size=8)(torch.ones(1, 2, 8))
    assert (y.sum().item(), state) == (32, None)
    # alone, it is the first of its model
    assert asked == ["lifted", {"hidden_size": 8, "layer_idx": 0}]


def test_an_op_alone_gets_no_state():
    outputs = op_alone(MIXER["gla"], MIXER["gla"].make(32, 16, 8), 1, 4, CPU)()
    # o, and the gradients of q, k, v and g
    assert [tuple(x.shape) for x in outputs] == [
        (1, 4, 2, 16), (1, 4, 2, 8), (1, 4, 2, 8), (1, 4, 2, 16), (1, 4, 2, 8),
    ]  # fmt: skip


@pytest.mark.parametrize(("mode", "made"), [("model", "make"), ("defaults", "defaults")])
@pytest.mark.parametrize("host_ms", [None, 0.5])
def test_a_layer_in_figures(mode, made, host_ms, monkeypatch):
    """Of both passes 6 ms, of which the projections take 2 and the op 1; the model's layer, or its own defaults."""
    taken = iter([(replace(TIMES, median_ms=6.0), host_ms, "a note"), (TIMES, None, ""), (TIMES, None, "")])
    of = iter([6.0, 2.0, 1.0])

    def device_times(run, device):
        times, host, note = next(taken)
        return replace(times, median_ms=next(of)), host, note

    asked = []
    monkeypatch.setattr(layers, "device_times", device_times)
    monkeypatch.setattr(layers, "projections", lambda layer, tokens, device: asked.append(tokens))
    monkeypatch.setattr(layers, "op_alone", lambda mixer, layer, batch, length, device: asked.append((batch, length)))
    monkeypatch.setattr(layers, "by_kernel", lambda *rest: {"gla_fwd": 1.5})
    mixer = simple(
        lambda width: asked.append("make") or Linear(width),
        defaults=lambda width: asked.append("defaults") or Linear(width), op="gla",
    )  # fmt: skip
    row = measure_layer(mixer, Row("layers", "simple", mode, {}, note="first"), SMALL, CPU)
    assert asked == [made, 32, (2, 16)]
    assert row.figures == {
        "layer_ms": 6.0, "low_ms": 3.0, "high_ms": 8.0, "projections_ms": 2.0, "op_ms": 1.0, "over": 2.0,
    } | ({} if host_ms is None else {"host_ms": 0.5})  # fmt: skip
    assert (row.note, list(row.kernels.values())) == ("first; by hand; a note", [1.5])


def test_a_layer_without_an_op_or_defaults(monkeypatch):
    monkeypatch.setattr(layers, "device_times", lambda run, device: (TIMES, None, ""))
    row = measure_layer(simple(), Row("layers", "simple", "defaults", {}), SMALL, CPU)
    assert sorted(row.figures) == ["high_ms", "layer_ms", "low_ms"]


def test_a_layer_that_is_not_finite_at_full_size_gets_no_time():
    mixer = simple(lambda width: with_infinity(Linear(width)))
    row = measure_layer(mixer, Row("layers", "simple", "model", {}), SMALL, CPU)
    assert (row.status, row.figures) == ("wrong", {})


@pytest.mark.parametrize(
    ("off", "like", "wrong"),
    [
        # twice the 1% by which plain PyTorch is off, and 1.5% besides
        (0.034, 0.01, False),
        (0.036, 0.01, True),
        (0.014, 0.0, False),
        (0.016, 0.0, True),
        (float("nan"), 0.01, True),
    ],
)
def test_what_a_mixer_may_be_off(off, like, wrong):
    exact = torch.ones(4, dtype=torch.float64)
    found = checking._compare(
        ["first", "second", "third"], [exact * 1.002, exact * (1 + off), exact * 1.001],
        [exact, exact * (1 + like), exact], [exact] * 3,
    )  # fmt: skip
    limit = pytest.approx(2 * like + 0.015)
    assert (found.error, found.limit) == (pytest.approx(off, nan_ok=True), limit)
    assert found.wrong == ("" if not wrong else f"relative error {off:.1e} of second, limit {2 * like + 0.015:.1e}")


def test_what_cannot_be_compared_has_no_error_and_unread_weights_a_gradient_of_zeros():
    found = check(simple(), SMALL, CPU)
    assert (found.wrong, found.error > 0) == ("", True)
    broken = simple(Doubled, exact=False, steps=False)
    assert check(broken, SMALL, CPU) == checking.Checked()
    assert "of the output" in check(replace(broken, exact=True), SMALL, CPU).wrong


class Drifts(Linear):
    """A tenth off where it goes on from a state."""

    def forward(self, x, state=None):
        y, after = super().forward(x)
        return (y if state is None else 1.1 * y), after


def test_a_step_that_is_a_tenth_off_is_wrong():
    found = check(simple(Drifts), SMALL, CPU)
    assert found.wrong.startswith("relative error 1.0e-01 of a step's output, limit ")
    assert found.limit < 0.05
    assert check(simple(Drifts, steps=False), SMALL, CPU).wrong == ""


def test_a_step_is_taken_alone_after_sixteen_tokens():
    taken = []

    class Notes(Linear):
        def forward(self, x, state=None):
            taken.append((x.shape[1], state is not None))
            return super().forward(x)

    assert check(simple(Notes), replace(SMALL, checked=(1, 20)), CPU).wrong == ""
    # the passes that are compared; the whole, the tokens before and the last one, and the whole in bfloat16
    assert taken == [(20, False)] * 3 + [(17, False), (16, False), (1, True), (17, False)]


class Doubled(Linear):
    """Right by the plain backends alone."""

    backend = None

    def forward(self, x, state=None):
        y, state = super().forward(x)
        return (1 if self.backend else 2) * y, state


def test_backends_of_plain_pytorch():
    for name, backend in {"gla": "chunked", "slstm": "loop", "lstm": "loop", "rglru": "chunked"}.items():
        copied = checking.plain(MIXER[name].make(32, 16, 8), torch.float64)
        found = {part.backend for part in copied.modules() if hasattr(part, "backend")}
        assert found == {backend}
        assert {p.dtype for p in copied.parameters()} == {torch.float64}


def test_one_step_is_of_the_last_token_after_the_others():
    for name in ("attention", "gla", "lstm"):
        layer, x = MIXER[name].make(32, 16, 8), torch.randn(2, 5, 32)
        with torch.no_grad():
            torch.testing.assert_close(checking.one_step(layer, x), layer(x)[0][:, -1:], rtol=1e-4, atol=1e-5)


def test_a_step_of_training_learns_the_next_token_and_gives_the_loss_before_it():
    model, tokens = make_model(ATTENTION, SMALL, CPU), torch.arange(34).view(2, 17) % 7
    again = make_model(ATTENTION, SMALL, CPU)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        before = F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())
    step = training_step(model, tokens)
    losses = [step().item() for _ in range(20)]
    assert losses[0] == pytest.approx(before.item(), rel=1e-6)
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > losses[-1] + 1e-3


@pytest.mark.parametrize(("once", "runs"), [((0.1, 9.0), 10), ((9.0, 0.1), 10), ((5.0, 5.0), 5), ((1e-5, 1e-5), 12)])
def test_steps_that_are_timed(once, runs, monkeypatch):
    monkeypatch.setattr(training.clock, "SECONDS", 1.0)
    left = [*once, *[0.002] * runs]
    monkeypatch.setattr(training.clock, "seconds_of", lambda step, device: left.pop(0))
    assert training._step_ms(lambda: None, CPU) == [2.0] * runs
    assert left == []


def test_steps_on_a_gpu_are_timed_from_one_mark_to_the_next(monkeypatch):
    now = [0.0]

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = now[0]

        def elapsed_time(self, later):
            return later.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(training.clock, "seconds_of", lambda step, device: 1e9)
    monkeypatch.setattr(training, "synchronize", lambda device: None)
    lengths = [3.0, 1.0, 4.0, 1.0, 5.0]
    left = list(lengths)
    assert training._step_ms(lambda: now.__setitem__(0, now[0] + left.pop(0)), CUDA) == lengths


@pytest.fixture
def steps(monkeypatch):
    """Five steps of these lengths, in which the device is busy for 2 ms."""
    monkeypatch.setattr(training, "_step_ms", lambda step, device: [1.0, 2.0, 3.0, 4.0, 10.0])
    monkeypatch.setattr(training, "by_kernel", lambda step, device: {"gla_fwd": 1.5, "Memcpy": 0.5})


def test_a_model_in_training_in_figures(steps):
    (row,) = measure_training(ATTENTION, training_rows(ATTENTION, SMALL, "training")[:1], SMALL, CPU)
    figures = row.figures
    # 2 x 16 tokens in 4 ms on the mean
    assert figures.pop("tokens_per_s") == pytest.approx(8000.0)
    assert 0 < figures.pop("first_step_s") < 60
    # as good as chance among 64 tokens
    assert figures.pop("loss") == pytest.approx(4.16, abs=0.5)
    model = Model(ATTENTION, SMALL)
    assert figures == {
        "step_ms": 3.0, "low_ms": 2.0, "high_ms": 4.0, "steps": 5, "device_ms": 2.0,
        "parameters": sum(p.numel() for p in model.parameters()),
    }  # fmt: skip
    assert (row.kinds, list(row.kernels.values())) == ({"op": 1.5, "copies": 0.5}, [1.5, 0.5])


def test_the_peak_of_memory_is_read_on_a_gpu(steps, monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: asked.append("reset"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: asked.append("read") or 123)
    row = training_rows(ATTENTION, SMALL, "training")[0]
    found = training._measured(row, Model(ATTENTION, SMALL), torch.zeros(2, 17, dtype=torch.long), CUDA)
    assert (found.figures["memory_bytes"], asked) == (123, ["reset", "read"])


class Explodes(Linear):
    """A factor on the output, another on its gradient."""

    def __init__(self, width, out, gradient):
        super().__init__(width)
        self.out, self.gradient = out, gradient

    def forward(self, x, state=None):
        y, state = super().forward(x)
        y.register_hook(lambda grad: grad * self.gradient)
        return y * self.out, state


@pytest.mark.parametrize(
    ("out", "gradient", "said"), [(1.0, torch.inf, r"loss 4\.\d*, gradients not finite"), (torch.nan, 1.0, "loss nan")]
)
def test_a_loss_or_gradients_that_are_not_finite_are_wrong(out, gradient, said, steps):
    mixer = simple(lambda width: Explodes(width, out, gradient))
    row = training_rows(mixer, SMALL, "training")[0]
    (found,) = measure_training(mixer, [row], SMALL, CPU)
    assert (found.status, found.figures) == ("wrong", {})
    assert re.match(said, found.detail)


def test_a_loss_that_is_nan_is_wrong_though_gradients_are_finite(steps, monkeypatch):
    monkeypatch.setattr(training, "training_step", lambda model, tokens: lambda: torch.tensor(torch.nan))
    row = training_rows(ATTENTION, SMALL, "training")[0]
    model = Model(ATTENTION, SMALL)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    assert training._measured(row, model, torch.zeros(1, 2), CPU).detail == "loss nan, gradients finite"


@pytest.mark.parametrize(
    ("eager", "compiled", "status"),
    [
        (2.0, 2.019, "ok"), (2.0, 1.981, "ok"), (2.0, 2.021, "wrong"), (2.0, 1.979, "wrong"), (100.0, 101.0, "ok"),
        (None, 2.0, "ok"),
    ],
)  # fmt: skip
def test_a_compiled_model_is_right_within_a_hundredth_of_the_eager_loss(eager, compiled, status, monkeypatch):
    losses, tokens = {"eager": eager, "compiled": compiled}, []

    def measured(row, model, given, device):
        tokens.append(given)
        loss = losses[row.mode]
        return replace(row, status="ok" if loss else "wrong", figures={"loss": loss} if loss else {})

    compiled_ = []
    monkeypatch.setattr(training, "make_model", lambda *rest: "model")
    monkeypatch.setattr(training, "_compile", lambda model, scale: compiled_.append(model))
    monkeypatch.setattr(training, "_graphs", lambda: {"graphs": 1, "breaks": 0})
    monkeypatch.setattr(training, "_measured", measured)
    first, second = measure_training(ATTENTION, training_rows(ATTENTION, SMALL, "training"), SMALL, CPU)
    assert (second.status, compiled_) == (status, ["model"])
    assert (second.figures == {"loss": compiled, "graphs": 1, "breaks": 0}) == (status == "ok")
    assert "graphs" not in first.figures
    # one more than are read; the same for both
    assert [x.shape for x in tokens] == [(2, 17)] * 2
    assert torch.equal(*tokens)
    assert (tokens[0].min() >= 0, tokens[0].max() < SMALL.vocabulary, len(tokens[0].unique()) > 10) == (True,) * 3


@pytest.mark.parametrize(
    ("cores", "most", "expected"), [(64, 15, 12), (64, 3, 3), (8, 15, 6), (2, 15, 1), (None, 15, 1)]
)
def test_as_many_children_as_cores_allow_and_no_more_than_twelve(cores, most, expected, monkeypatch):
    """Other libraries' come first, since they take longest."""
    asked = []

    class Pool:
        def __init__(self, workers):
            asked.append(workers)

        def __enter__(self):
            return self

        def __exit__(self, *rest):
            pass

        def map(self, one, order):
            return asked.append([mixer.exact for mixer in order]) or []

    monkeypatch.setattr(warm, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(warm.os, "cpu_count", lambda: cores)
    monkeypatch.setattr(warm, "_keep_autotuned", lambda: asked.append("kept"))
    warm.warm(MIXERS[:most], ["host"], SMALL, CPU)
    workers, order, kept = asked
    assert (workers, kept) == (expected, "kept")
    assert order == sorted(order)


def test_a_child_has_one_block_and_one_layer_and_takes_no_time(monkeypatch, tmp_path, capsys):
    found = []

    class Suite:
        def __init__(self, scale, device):
            found.append((scale, warm.clock.SECONDS, warm.clock.LEAST))

        def measure(self, mixer, rows):
            found.append((mixer.name, rows[0].part))
            yield from rows

    path = tmp_path / "request.json"
    path.write_text(json.dumps({"mixer": "gla", "parts": ["host", "longer"], "scale": asdict(FULL), "device": "cpu"}))
    monkeypatch.setattr(warm.sys, "argv", ["warm", str(path)])
    monkeypatch.setattr(warm, "Suite", Suite)
    monkeypatch.setattr(warm, "compile_here", lambda: None)
    warm.main()
    (scale, seconds, least), *parts = found
    assert (scale.blocks, scale.decode_layers, seconds) == (1, 1, 0.0)
    # quartiles want two
    assert least == 2
    assert replace(scale, blocks=16, decode_layers=12, vocabulary=32000) == FULL
    assert parts == [("gla", "host"), ("gla", "longer")]


def test_what_autotuners_chose_is_looked_for():
    knobs = pytest.importorskip("triton").knobs
    before = knobs.autotuning.cache
    try:
        knobs.autotuning.cache = False
        warm._keep_autotuned()
        assert knobs.autotuning.cache is True
    finally:
        knobs.autotuning.cache = before
