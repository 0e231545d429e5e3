"""The suite of whole models: what counts as right, what a row says, and that nothing ends it."""

import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from holdfast import nn as hnn
from holdfast.cli.app import app
from holdfast.cli.attention import with_room
from holdfast.cli.bench import session
from holdfast.cli.bench.models import device_time, live, mixers, suite, training, warm
from holdfast.cli.bench.models.attention import Attention
from holdfast.cli.bench.models.check import _compare, check
from holdfast.cli.bench.models.decoding import decode_step
from holdfast.cli.bench.models.kinds import kind_of
from holdfast.cli.bench.models.layers import layer_rows, measure_layer, op_alone, projections
from holdfast.cli.bench.models.mixers import MIXERS, Mixer, chosen, op_sizes
from holdfast.cli.bench.models.model import Model
from holdfast.cli.bench.models.row import ModelsRecord, Row, is_models_record, read, write
from holdfast.cli.bench.models.scale import FULL, SMALL
from holdfast.cli.bench.models.section import section
from holdfast.cli.bench.models.suite import PARTS, Suite, rows_of
from holdfast.cli.bench.models.training import measure_training, training_rows
from holdfast.cli.bench.models.words import line_of
from holdfast.cli.bench.page import page
from holdfast.cli.bench.peers import fla

CPU = torch.device("cpu")
ATTENTION = MIXERS[0]
HERE = [mixer for mixer in MIXERS if mixer.exact and mixer.name != "torch lstm"]


class Linear(nn.Module):
    """A mixer of one matrix; off in every dtype but float64 by the share `off`."""

    def __init__(self, width: int, off: float = 0.0) -> None:
        super().__init__()
        self.proj, self.off = nn.Linear(width, width, bias=False), off

    def forward(self, x, state=None):
        y = self.proj(x)
        return (y if y.dtype == torch.float64 else (1 + self.off) * y), (torch.zeros(1),)


class Sum(nn.Module):
    """The sum of all tokens so far, or without them where a state is to say it."""

    def forward(self, x, state=None):
        return x.cumsum(1), (x.sum(1),)


def named(mixers, name):
    return next(mixer for mixer in mixers if mixer.name == name)


def simple(make, **fields):
    return Mixer("simple", lambda width, head, narrow: make(width), **fields)


@pytest.mark.parametrize("mixer", HERE, ids=lambda mixer: mixer.name)
def test_every_mixer_is_right_here(mixer):
    found = check(mixer, SMALL, CPU)
    assert found.wrong == ""
    assert 0 < found.error <= found.limit


def test_what_is_just_within_the_limit_is_right():
    """Of an exact 200, a plain layer that is right leaves 1.5%."""
    exact = torch.tensor([200.0], dtype=torch.float64)
    found = [_compare(["y"], [torch.tensor([got])], [exact], [exact]) for got in (203.0, 203.01)]
    assert [(each.wrong, each.limit) for each in found] == [
        ("", 0.015), ("relative error 1.5e-02 of y, limit 1.5e-02", 0.015),
    ]  # fmt: skip
    assert found[0].error == 0.015


def test_what_is_off_is_wrong():
    assert check(simple(Linear), SMALL, CPU).wrong == ""
    assert "of the output" in check(simple(Broken), SMALL, CPU).wrong
    assert "not finite" in check(simple(lambda width: Linear(width, float("inf"))), SMALL, CPU).wrong
    assert "of a step's output" in check(simple(lambda width: Chain(Linear(width), Sum())), SMALL, CPU).wrong


class Chain(nn.Module):
    """One after the other, with the state of the last."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x, state=None):
        return self.second(self.first(x)[0], state)


class Broken(Linear):
    """Right by the plain backends alone."""

    backend = None

    def forward(self, x, state=None):
        y, state = super().forward(x)
        return (y if self.backend else 1.2 * y), state


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("conv_forward", "convolution"),
        ("norm_backward", "norm"),
        ("delta_rule_fwd", "op"),
        ("dense_one_block_forward", "op"),
        ("dense_many_blocks_backward", "op"),
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "projection"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "projection"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26", "attention"),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true, 64>(void const*)", "attention"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float>", "norm"),
        ("void at::native::vectorized_elementwise_kernel<8, at::native::bfloat16_copy_kernel_cuda", "copies"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<at::native::OpaqueType<2u>>", "copies"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::sigmoid_kernel_cuda", "element-wise"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", "element-wise"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimiser"),
        ("void (anonymous namespace)::softmax_warp_forward", "loss"),
        ("triton_poi_fused__to_copy_clone_t_12", "copies"),
        ("triton_per_fused__to_copy_add_mul_12", "element-wise"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_2", "norm"),
        ("triton_tem_fused_mm_1", "projection"),
        ("chunk_gated_delta_rule_fwd_kernel_h_blockdim64", "op"),
        ("who knows", "other"),
    ],
)
def test_kinds_of_kernels_by_name(kernel, kind):
    assert kind_of(kernel) == kind


@pytest.mark.parametrize("runs", [1, 4])
def test_device_time_is_of_one_run_and_of_kernels_alone(monkeypatch, runs):
    """In milliseconds, the longest first; the profiler tells microseconds."""
    made = []

    class Profile:
        def __init__(self, activities):
            assert activities == [torch.profiler.ProfilerActivity.CUDA]

        def __enter__(self):
            return self

        def __exit__(self, *rest):
            pass

        def events(self):
            taken = [("copy", "CUDA", 500.0), ("gla_fwd", "CUDA", 1500.0), ("aten::mm", "CPU", 9e6)] * len(made)
            return [
                SimpleNamespace(name=name, device_type=getattr(torch.autograd.DeviceType, kind), device_time=us)
                for name, kind, us in taken
            ]

    monkeypatch.setattr(device_time, "profile", Profile)
    monkeypatch.setattr(device_time, "synchronize", lambda device: None)
    given = () if runs == 1 else (runs,)
    found = device_time.by_kernel(lambda: made.append(1), torch.device("cuda"), *given)
    assert list(found.items()) == [("gla_fwd", 1.5), ("copy", 0.5)]
    assert len(made) == runs
    assert device_time.by_kernel(lambda: made.append(1), CPU) == {}


def test_kinds_add_up_and_the_longest_are_named():
    kernels = {f"elementwise_{n}": 2.0 for n in range(20)} | {"x" * 200: 1.0}
    found = device_time.by_kind(kernels)
    assert sum(found.values()) == 41.0
    named_ = device_time.longest(dict(reversed(kernels.items())))
    assert len(named_) == device_time.NAMED == 15
    first, *rest = named_
    assert len(first) == 120
    assert rest[0].endswith(": elementwise_19")


def test_the_model_has_the_size_that_it_says():
    with torch.device("meta"):
        model = Model(ATTENTION, FULL)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == 162
    blocks = sum(p.numel() for p in model.blocks.parameters() if p.dim() > 1)
    assert blocks == FULL.blocks * 12 * FULL.width**2
    # two norms a block and one behind them, embedding and head, no biases
    rest = (2 * FULL.blocks + 1) * FULL.width + 2 * FULL.vocabulary * FULL.width
    assert sum(p.numel() for p in model.parameters()) == blocks + rest


@pytest.mark.parametrize("mixer", HERE, ids=[mixer.name for mixer in HERE])
def test_a_trained_block_hands_out_no_state(mixer):
    """Each would be a gradient of zeros that a compiled block's backward pass computes with."""
    model = Model(mixer, SMALL)
    y = model.blocks[0](torch.randn(1, 4, SMALL.width))
    assert isinstance(y, torch.Tensor)
    assert y.shape == (1, 4, SMALL.width)


def test_a_step_moves_weights_by_a_ten_thousandth():
    """Adam's first step is the rate, whatever the gradient; a hundredth of it decays."""
    model = training.make_model(named(MIXERS, "rglru"), SMALL, CPU)
    before = model.head.weight.detach().clone()
    training.training_step(model, torch.randint(SMALL.vocabulary, (1, 5)))()
    moved = (model.head.weight - (1 - 1e-6) * before).abs()
    assert moved.max().item() == pytest.approx(1e-4, rel=0.01)


def test_rows_to_come():
    cuda = torch.device("cuda")
    sizes = [(row.mode, row.sizes["B"], row.sizes["T"]) for row in training_rows(ATTENTION, FULL, "training")]
    assert sizes == [("eager", 8, 2048), ("compiled", 8, 2048)]
    longer = training_rows(ATTENTION, FULL, "longer")
    assert [(row.sizes["B"], row.sizes["T"]) for row in longer[::2]] == [(2, 8192), (1, 32768)]
    assert rows_of("longer", named(MIXERS, "torch lstm"), FULL, cuda) == []
    assert [row.mode for row in rows_of("decoding", ATTENTION, FULL, cuda)] == ["eager", "graph"] * 2
    assert rows_of("decoding", named(MIXERS, "fla gla"), FULL, cuda) == []
    assert [row.mode for row in rows_of("host", named(MIXERS, "gla"), FULL, cuda)] == ["op gla", "layer"]
    keys = [row.key for part in PARTS for mixer in MIXERS for row in rows_of(part, mixer, FULL, cuda)]
    assert len(keys) == len(set(keys))


def test_attention_is_always_among_the_chosen():
    assert [mixer.name for mixer in chosen(["gated_delta_net"])] == [
        "attention",
        "gated_delta_net",
        "fla gated_delta_net",
    ]
    assert chosen([""]) == list(MIXERS)


def test_heads_and_widths_of_each_mixer(monkeypatch):
    """At width 512, heads of 32 and narrow ones of 16: runs of another day are held against those of today."""
    monkeypatch.setattr(mixers, "_fla", lambda layer, **sizes: {"layer": layer, **sizes})
    with torch.device("meta"):
        found = {mixer.name: mixer.make(512, 32, 16) for mixer in MIXERS}
    assert found["attention"].num_heads == 32
    assert {mixer.name: op_sizes(found[mixer.name]) for mixer in MIXERS if mixer.op} == {
        "gated_delta_net": {"H": 16, "K": 32, "V": 32}, "delta_net": {"H": 16, "K": 32, "V": 32},
        "gated_delta_product": {"H": 16, "K": 32, "V": 32}, "kda": {"H": 16, "K": 32, "V": 32},
        "rwkv7": {"H": 32, "K": 16, "V": 16},
        "mamba1": {"D": 1024, "N": 16}, "mamba2": {"H": 64, "Hq": 1, "K": 32, "V": 16},
        "gla": {"H": 16, "K": 16, "V": 32},
        "mlstm": {"H": 16, "K": 32, "V": 32}, "retnet": {"H": 16, "K": 32, "V": 32}, "rglru": {"D": 512},
        "rotlru": {"D": 512}, "slstm": {"H": 32, "D": 16}, "lstm": {"H": 32, "D": 16},
    }  # fmt: skip
    assert [found[mixer.name] for mixer in MIXERS if mixer.name.startswith("fla ")] == [
        {"layer": "GatedDeltaNet", "hidden_size": 512, "num_heads": 16, "head_dim": 32, "expand_v": 1},
        {"layer": "GatedLinearAttention", "hidden_size": 512, "num_heads": 16, "expand_k": 0.5},
        {
            "layer": "Mamba2", "hidden_size": 512, "num_heads": 64, "head_dim": 16, "state_size": 32,
            "use_bias": False,
        },
    ]  # fmt: skip


def test_projections_and_op_of_a_layer():
    layer = hnn.GLA(32, num_heads=2, expand_k=0.5)
    found = projections(layer, 8, CPU)()
    assert [tuple(y.shape) for y in found[:3]] == [(1, 8, 112), (1, 8, 32), (1, 32, 112)]
    # in, with the decay's down; its up; out
    assert len(found) == 3 * 3
    assert op_sizes(layer) == {"H": 2, "K": 8, "V": 16}
    outputs = op_alone(named(MIXERS, "gla"), layer, 2, 4, CPU)()
    assert outputs[0].shape == (2, 4, 2, 16)
    assert op_sizes(hnn.Mamba2(32, num_heads=4, d_state=16)) == {"H": 4, "Hq": 1, "K": 16, "V": 16}
    assert len(projections(hnn.RGLRU(32), 8, CPU)()) == 3 * 3


def test_a_layer_over_what_it_must_do():
    mixer = named(MIXERS, "rglru")
    row = measure_layer(mixer, layer_rows(mixer, SMALL)[0], SMALL, CPU)
    figures = row.figures
    assert figures["over"] == figures["layer_ms"] / (figures["projections_ms"] + figures["op_ms"])
    assert "x projections" in line_of(row, [row])


def test_training_is_held_against_eager_and_attention():
    rows = list(measure_training(ATTENTION, training_rows(ATTENTION, SMALL, "training"), SMALL, CPU))
    assert [row.status for row in rows] == ["ok", "ok"]
    assert rows[1].figures["graphs"] == 1
    assert rows[1].figures["breaks"] == 0
    assert rows[0].figures["loss"] == pytest.approx(rows[1].figures["loss"], rel=1e-3)
    fast = replace(
        rows[0], mixer="fast", figures=rows[0].figures | {"tokens_per_s": 3 * rows[0].figures["tokens_per_s"]}
    )
    assert "3 x attention" in line_of(fast, [*rows, fast])


def test_a_compiled_model_of_another_loss_is_wrong(monkeypatch):
    monkeypatch.setattr(training, "LOSS_LIMIT", -1.0)
    rows = list(measure_training(ATTENTION, training_rows(ATTENTION, SMALL, "training"), SMALL, CPU))
    assert [row.status for row in rows] == ["ok", "wrong"]
    assert rows[1].figures == {}


def test_decoding_goes_on_from_the_states_in_their_memory():
    for make in (lambda: hnn.GLA(32, num_heads=2), lambda: hnn.RetNet(32, num_heads=2)):
        layers = [make(), make()]
        x = torch.randn(1, 6, 32)
        y, states = x[:, :4], []
        for layer in layers:
            out, state = layer(y)
            y = y + out
            states.append(tuple(part.detach() for part in state))
        token = x[:, 4:5].clone()
        run = decode_step(layers, token, states)
        first = run()
        token.copy_(x[:, 5:])
        whole = x
        for layer in layers:
            whole = whole + layer(whole)[0]
        torch.testing.assert_close(torch.cat([first, run()], 1), whole[:, 4:], rtol=1e-4, atol=1e-5)


def test_attention_decodes_from_a_cache_with_room():
    layer, x = Attention(32, 2), torch.randn(2, 5, 32)
    _, state = layer(x[:, :4])
    state = with_room(tuple(part.detach() for part in state), 1)
    # the last place, however often
    for _ in range(2):
        torch.testing.assert_close(layer.step(x[:, 4:], state), layer(x)[0][:, 4:])


def test_a_failure_is_a_row():
    def raises(width):
        raise RuntimeError("no\nroom")

    def missing(width):
        raise ModuleNotFoundError("No module named 'fla'")

    for make, status, detail in (
        (raises, "failed", "RuntimeError: no room"),
        (missing, "missing", "No module named 'fla'"),
    ):
        mixer = simple(make)
        rows = list(Suite(SMALL, CPU).measure(mixer, rows_of("training", mixer, SMALL, CPU)))
        assert [row.status for row in rows] == [status] * 2
        assert detail in rows[0].detail
    # right, and then out of memory at full size
    mixer = simple(Linear)
    suite_ = Suite(SMALL, CPU)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(suite._ALONE, "decoding", lambda *rest: raises(1))
        rows = list(suite_.measure(mixer, rows_of("decoding", mixer, SMALL, CPU)))
    assert [(row.status, row.detail) for row in rows] == [("failed", "RuntimeError: no room")] * 2
    assert rows[0].error > 0


def test_a_wrong_mixer_gets_no_time():
    mixer = simple(lambda width: Chain(Linear(width), Sum()))
    rows = list(Suite(SMALL, CPU).measure(mixer, rows_of("layers", mixer, SMALL, CPU)))
    assert [(row.status, row.figures) for row in rows] == [("wrong", {})]


def test_a_child_runs_all_of_a_mixer_at_one_block(tmp_path, monkeypatch, capsys):
    request = tmp_path / "request.json"
    wanted = {"mixer": "rglru", "parts": ["training", "decoding"], "scale": asdict(SMALL), "device": "cpu"}
    request.write_text(json.dumps(wanted))
    monkeypatch.setattr(warm.sys, "argv", ["warm", str(request)])
    warm.main()
    assert capsys.readouterr().out.split("\n") == [
        "training eager ok ",
        "training compiled ok ",
        "decoding eager ok ",
        "decoding eager ok ",
        "",
    ]


def test_a_child_that_ends_badly_is_a_line(monkeypatch):
    def run(command, timeout, **rest):
        assert rest == {"capture_output": True, "text": True}
        if timeout < 1:
            raise warm.subprocess.TimeoutExpired(command, timeout)
        return warm.subprocess.CompletedProcess(command, -11, "", "one\nlast")

    monkeypatch.setattr(warm.subprocess, "run", run)
    for limit, said in (
        (0.5, "rglru: not compiled ahead within 0 s"),
        (9, "rglru: not compiled ahead, exit status -11 last"),
    ):
        lines = []
        warm.warm([named(MIXERS, "rglru")], PARTS, SMALL, CPU, lines.append, limit)
        assert lines == [said]


@pytest.fixture
def line(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return ["bench", "--suite", "models", "--scaled", "--device", "cpu", "--seconds", "0.001", "--commit", "abc"]


def test_rows_land_in_a_record_and_first_on_the_page(line, tmp_path):
    result = CliRunner().invoke(app, [*line, "--match", "rglru", "--parts", "layers,host"])
    assert result.exit_code == 0, result.output
    path = tmp_path / "benchmarks/results/cpu/models-scaled.json"
    assert is_models_record(path)
    record = read(path)
    assert record.complete
    assert record.command == "holdfast bench --suite models --match rglru --parts layers,host --seconds 0.001 --scaled"
    assert {row.mixer for row in record.rows} == {"attention", "rglru"}
    assert {row.status for row in record.rows} == {"ok"}
    assert not path.with_name("models-scaled.unfinished.json").exists()
    write(record, path)
    assert read(path) == record
    result = CliRunner().invoke(app, ["bench", "report"])
    assert result.exit_code == 0, result.output
    text = (tmp_path / "benchmarks/results/report.html").read_text()
    assert "<h3>One layer</h3>" in text
    assert "scaled_dot_product_attention" in text


def test_a_run_that_was_cut_short_goes_on(line, tmp_path, monkeypatch):
    line += ["--match", "rglru", "--parts", "host"]
    broken, replaced = [], []

    def lost_after(row, device):
        broken.append(row)
        return "an illegal memory access" if len(broken) == 2 else ""

    monkeypatch.setattr(live, "lost_after", lost_after)
    monkeypatch.setattr(session.os, "execv", lambda path, arguments: replaced.append(arguments))
    result = CliRunner().invoke(app, line)
    assert "an illegal memory access" in result.output
    assert len(replaced) == 1
    draft = tmp_path / "benchmarks/results/cpu/models-scaled.unfinished.json"
    assert [row.status for row in read(draft).rows] == ["ok", "failed"]
    other = CliRunner().invoke(app, [*line, "--seconds", "0.002"])
    assert "is an unfinished run of another command" in str(other.exception)
    result = CliRunner().invoke(app, line)
    assert result.exit_code == 0, result.output
    rows = read(draft.with_name("models-scaled.json")).rows
    assert [row.status for row in rows] == ["ok", "failed", *["ok"] * (len(rows) - 2)]
    assert len({row.key for row in rows}) == len(rows) == 6


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--suite", "models", "--device", "cpu"], "made for a GPU"),
        (["--suite", "models", "--scaled", "--device", "cpu", "--match", "lstn"], "no mixer has this text"),
        (["--suite", "models", "--scaled", "--device", "cpu", "--parts", "layer"], "expected some of training"),
        (["--suite", "models", "--scaled", "--device", "cpu", "--cold", "2"], "--cold: has no meaning"),
        (["--suite", "models,smoke", "--device", "cpu"], "rows of its own kind"),
        (["--suite", "smoke", "--parts", "layers", "--device", "cpu"], "--parts: has no meaning"),
    ],
)
def test_mistakes(options, said):
    assert said in str(CliRunner().invoke(app, ["bench", *options]).exception)


def test_the_page_says_how_fast_and_what_has_no_figures():
    scale = json.loads(json.dumps(asdict(FULL)))
    sizes = {"B": 8, "T": 2048, "d": 768, "blocks": 16}
    figures = {"tokens_per_s": 1e5, "step_ms": 160.0, "memory_bytes": 2**30}
    rows = (
        Row("training", "attention", "eager", sizes, figures=figures, kinds={"projection": 3.0, "attention": 1.0}),
        Row("training", "gla", "eager", sizes, figures=figures | {"tokens_per_s": 1.5e5}, kinds={"op": 2.0}),
        Row("training", "fla <gla>", "eager", sizes, "missing", "No module"),
    )
    record = ModelsRecord("holdfast bench --suite models", "2026-01-02T03:04:05", "abc", {"name": "x"}, {}, scale, rows)
    text = section(record, "m0", "Models on x")
    assert '150,000 <span class="good">1.5 x</span>' in text
    assert "1024 MiB" in text
    assert "fla &lt;gla&gt;" in text
    assert "the run did not reach its end" in text
    assert page([], [record]).index('id="m0"') < page([], [record]).index("</html>")
    assert line_of(rows[0], rows).endswith("projection 75%, attention 25%")


def test_a_peers_refusal_is_lifted_wherever_it_has_been_read(monkeypatch):
    """One of its modules keeps a copy of what another knows of Triton."""
    places = {name: SimpleNamespace(TRITON_ABOVE_3_7_1=False) for name in ("fla.utils", "fla.ops.common.chunk_o")}
    monkeypatch.setattr(fla, "import_module", places.__getitem__)
    assert fla.lift_refusal()
    assert all(place.TRITON_ABOVE_3_7_1 for place in places.values())
    monkeypatch.setattr(fla, "import_module", lambda _: SimpleNamespace())
    assert not fla.lift_refusal()
