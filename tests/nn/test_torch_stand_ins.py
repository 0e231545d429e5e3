"""LSTM, GRU and RNN in torch.nn's place: same weights, results and gradients, every way of calling them."""

import copy
import itertools
import pickle

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

import holdfast
from parity import relative_error

INPUT, HIDDEN = 5, 8
every_kind = pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])


def pair(kind, backend="loop", **options):
    """torch.nn's module and ours, with the same weights. backend: None for what a caller gets, which may be torch's."""
    theirs = getattr(torch.nn, kind)(INPUT, HIDDEN, **options)
    ours = getattr(holdfast.nn, kind)(INPUT, HIDDEN, backend=backend, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def states(kind, *shape):
    made = [torch.randn(shape, requires_grad=True) for _ in range(2 if kind == "LSTM" else 1)]
    return tuple(made) if kind == "LSTM" else made[0]


def tensors(result):
    output, hidden = result
    output = output.data if isinstance(output, PackedSequence) else output
    return [output, *(hidden if isinstance(hidden, tuple) else (hidden,))]


def agree(theirs, ours, x, hx, kind):
    """Results and all gradients, within 1e-5."""
    leaves = [] if hx is None else list(hx) if kind == "LSTM" else [hx]
    found = []
    for module in (theirs, ours):
        results = tensors(module(x) if hx is None else module(x, hx))
        draw = torch.Generator().manual_seed(2)
        loss = sum((r * torch.randn(r.shape, generator=draw)).sum() for r in results)
        data = x.data if isinstance(x, PackedSequence) else x
        found.append([*results, *torch.autograd.grad(loss, [*module.parameters(), *leaves, data])])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)


SHAPES = [
    {"num_layers": layers, "bidirectional": both, "bias": bias, "batch_first": first}
    for layers, both, bias, first in itertools.product((1, 2), (False, True), (False, True), (False, True))
]


@every_kind
@pytest.mark.parametrize("options", SHAPES, ids=lambda o: "-".join(map(str, map(int, o.values()))))
def test_results_and_gradients_are_torch_nns(kind, options):
    if kind == "RNN" and options["bias"]:
        options = options | {"nonlinearity": "relu"}
    theirs, ours = pair(kind, **options)
    layers = options["num_layers"] * (1 + options["bidirectional"])
    for batched in (True, False):
        x = torch.randn((3, 7, INPUT) if batched else (7, INPUT), requires_grad=True)
        shape = (layers, 3 if options["batch_first"] else 7, HIDDEN) if batched else (layers, HIDDEN)
        agree(theirs, ours, x, None, kind)
        agree(theirs, ours, x, states(kind, *shape), kind)


@pytest.fixture
def by_torch(monkeypatch):
    """How often torch.lstm has run."""
    calls, run = [], torch.lstm
    monkeypatch.setattr(torch, "lstm", lambda *given: calls.append(1) or run(*given))
    return calls


@pytest.mark.parametrize("options", SHAPES, ids=lambda o: "-".join(map(str, map(int, o.values()))))
def test_an_lstm_in_float32_on_a_cpu_is_onednns(options, by_torch):
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this build of PyTorch has no oneDNN")
    theirs, ours = pair("LSTM", backend=None, **options)
    layers = options["num_layers"] * (1 + options["bidirectional"])
    for batched in (True, False):
        x = torch.randn((3, 7, INPUT) if batched else (7, INPUT), requires_grad=True)
        shape = (layers, 3 if options["batch_first"] else 7, HIDDEN) if batched else (layers, HIDDEN)
        agree(theirs, ours, x, None, "LSTM")
        agree(theirs, ours, x, states("LSTM", *shape), "LSTM")
    assert len(by_torch) == 4


def test_what_onednn_does_not_serve_is_holdfasts(by_torch):
    _, ours = pair("LSTM", backend=None)
    x = torch.randn(7, 3, INPUT)
    wide = tuple(y.double() for y in states("LSTM", 1, 3, HIDDEN))
    with torch.no_grad():
        ours(pack_sequence([torch.randn(4, INPUT), torch.randn(2, INPUT)]))
        ours(x[:0])
        ours(x[:, :0])
        ours(x, wide)
        with torch.autocast("cpu", torch.bfloat16):
            ours(x)
        holdfast.nn.LSTM(INPUT, HIDDEN, num_heads=2)(x)
        copy.deepcopy(ours).double()(x.double())
        copy.deepcopy(ours).bfloat16()(x.bfloat16())
        torch.compile(ours, backend="eager", fullgraph=True)(x)
    assert not by_torch
    ours(x)
    assert len(by_torch) == torch.backends.mkldnn.is_available()


@every_kind
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("packed", [False, True])
def test_directions_side_by_side_as_on_a_gpu(kind, heads, packed, monkeypatch):
    """Both directions as heads of one call: the results of two calls."""
    ours = getattr(holdfast.nn, kind)(INPUT, HIDDEN, num_layers=2, bidirectional=True, num_heads=heads)
    x = torch.randn(9, 3, INPUT, requires_grad=True)
    hx = states(kind, 4, 3, HIDDEN)
    leaves = [*ours.parameters(), x, *(hx if kind == "LSTM" else [hx])]
    found = []
    for _ in range(2):
        results = tensors(ours(pack_padded_sequence(x, [9, 5, 2]) if packed else x, hx))
        loss = sum((result * torch.linspace(-1, 1, result.numel()).view_as(result)).sum() for result in results)
        found.append([*results, *torch.autograd.grad(loss, leaves)])
        monkeypatch.setattr(type(ours), "_groups", lambda self, layer, x: [self._suffixes(layer)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)


@every_kind
@pytest.mark.parametrize("sorted_already", [True, False])
@pytest.mark.parametrize(("layers", "both"), [(1, False), (2, True)])
def test_packed_sequences_are_torch_nns(kind, sorted_already, layers, both):
    theirs, ours = pair(kind, num_layers=layers, bidirectional=both)
    lengths = (6, 6, 3, 1) if sorted_already else (3, 6, 1, 6)
    parts = [torch.randn(length, INPUT) for length in lengths]
    packed = pack_sequence(parts, enforce_sorted=sorted_already)
    packed = packed._replace(data=packed.data.requires_grad_())
    agree(theirs, ours, packed, None, kind)
    agree(theirs, ours, packed, states(kind, layers * (1 + both), 4, HIDDEN), kind)
    padded, found = pad_packed_sequence(ours(packed)[0])
    assert padded.shape == (6, 4, HIDDEN * (1 + both))
    assert found.tolist() == list(lengths)


@every_kind
def test_a_packed_sequence_of_a_padded_batch(kind):
    theirs, ours = pair(kind, batch_first=True)
    x = torch.randn(3, 9, INPUT)
    packed = pack_padded_sequence(x, torch.tensor([2, 9, 5]), batch_first=True, enforce_sorted=False)
    for a, b in zip(tensors(theirs(packed)), tensors(ours(packed)), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)


@every_kind
def test_weights_load_both_ways(kind):
    options = {"num_layers": 2, "bidirectional": True}
    theirs, ours = (getattr(module, kind)(INPUT, HIDDEN, **options) for module in (torch.nn, holdfast.nn))
    x = torch.randn(4, 3, INPUT)
    assert [(name, p.shape) for name, p in ours.named_parameters()] == [
        (name, p.shape) for name, p in theirs.named_parameters()
    ]
    before = tensors(ours(x))
    theirs.load_state_dict(ours.state_dict())
    for a, b in zip(before, tensors(theirs(x)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@every_kind
def test_clipped_gradients_are_torch_nns(kind):
    theirs, ours = pair(kind, num_layers=2)
    x = torch.randn(4, 2, INPUT)
    for module in (theirs, ours):
        tensors(module(x))[0].square().sum().backward()
        # in place, once each
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
    for a, b in zip(theirs.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-5, atol=1e-6)


@every_kind
def test_the_same_seed_gives_torch_nns_weights(kind):
    made = []
    for module in (torch.nn, holdfast.nn):
        torch.manual_seed(3)
        made.append(getattr(module, kind)(INPUT, HIDDEN, num_layers=2, bidirectional=True).state_dict())
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])


@every_kind
def test_dropout_acts_between_layers_and_in_training_only(kind):
    theirs, ours = pair(kind, num_layers=2, dropout=1.0)
    x = torch.randn(4, 3, INPUT)
    for module in (theirs, ours):
        module.train()
    # all is dropped between the layers: what is left is the second layer without input
    for a, b in zip(tensors(theirs(x)), tensors(ours(x)), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)
    trained = ours(x)[0]
    ours.eval()
    theirs.eval()
    torch.testing.assert_close(ours(x)[0], theirs(x)[0], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(trained, ours(x)[0])
    with pytest.warns(UserWarning, match="dropout"):
        getattr(holdfast.nn, kind)(INPUT, HIDDEN, dropout=0.5)


@every_kind
def test_heads_are_blocks_of_the_recurrent_weights(kind):
    heads, width = 4, HIDDEN // 4
    ours = getattr(holdfast.nn, kind)(INPUT, HIDDEN, num_layers=2, bidirectional=True, num_heads=heads)
    theirs = getattr(torch.nn, kind)(INPUT, HIDDEN, num_layers=2, bidirectional=True)
    weights = ours.state_dict()
    for name, blocks in weights.items():
        if name.startswith("weight_hh"):
            gates = blocks.shape[0] // HIDDEN
            assert blocks.shape == (gates * HIDDEN, width)
            full = torch.zeros(gates, HIDDEN, HIDDEN)
            for head in range(heads):
                span = slice(head * width, (head + 1) * width)
                full[:, span, span] = blocks.unflatten(0, (gates, heads, width))[:, head]
            weights[name] = full.flatten(0, 1)
    theirs.load_state_dict(weights)
    x = torch.randn(6, 3, INPUT)
    for a, b in zip(tensors(theirs(x)), tensors(ours(x)), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)


@every_kind
def test_state_carries_a_sequence_on(kind):
    ours = getattr(holdfast.nn, kind)(INPUT, HIDDEN, num_layers=2, num_heads=2)
    x = torch.randn(9, 3, INPUT)
    whole, last = ours(x)
    outputs, state = [], None
    for part in x.split([4, 0, 1, 4]):
        y, state = ours(part, state)
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs), whole, rtol=1e-5, atol=1e-6)
    for a, b in zip(tensors((whole, last)), tensors((whole, state)), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)


@every_kind
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dtypes_are_torch_nns(kind, dtype):
    theirs, ours = (getattr(m, kind)(INPUT, HIDDEN, dtype=dtype, device="cpu") for m in (torch.nn, holdfast.nn))
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(40, 3, INPUT, dtype=dtype)
    got, expected = tensors(ours(x)), tensors(theirs(x))
    exact = tensors(copy.deepcopy(theirs).double()(x.double()))
    for mine, other, right in zip(got, expected, exact, strict=True):
        assert mine.dtype == other.dtype == dtype
        limit = 1e-12 if dtype == torch.float64 else 2 * relative_error(other.double(), right) + 1e-6
        assert relative_error(mine.double(), right) <= limit
    hx = tuple(got[1:]) if kind == "LSTM" else got[1]
    assert ours(x, hx)[0].dtype == dtype


@every_kind
def test_backend_is_passed_on(kind):
    options = {"num_layers": 2, "bidirectional": True}
    plain = getattr(holdfast.nn, kind)(INPUT, HIDDEN, **options, backend="reference")
    fast = getattr(holdfast.nn, kind)(INPUT, HIDDEN, **options)
    fast.load_state_dict(plain.state_dict())
    x = torch.randn(4, 3, INPUT)
    torch.testing.assert_close(fast(x)[0], plain(x)[0], rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="'warp'"):
        getattr(holdfast.nn, kind)(INPUT, HIDDEN, backend="warp")(x)


@every_kind
def test_compiles_into_one_graph(kind):
    torch.compiler.reset()
    ours = getattr(holdfast.nn, kind)(INPUT, HIDDEN, num_layers=2, bidirectional=True)
    x = torch.randn(4, 3, INPUT)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    for a, b in zip(tensors(ours(x)), tensors(compiled(x)), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)
    compiled(x)[0].sum().backward()
    assert all(p.grad.isfinite().all() for p in ours.parameters())


@every_kind
def test_copies_and_pickles(kind):
    ours = getattr(holdfast.nn, kind)(INPUT, HIDDEN, num_heads=2)
    x = torch.randn(4, 3, INPUT)
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(other(x)[0], ours(x)[0])
    assert "num_heads=2" in repr(ours)
    ours.flatten_parameters()


@pytest.mark.parametrize(
    ("kind", "options", "error", "words"),
    [
        ("LSTM", {"proj_size": 2}, ValueError, ["proj_size", "0", "2"]),
        ("GRU", {"proj_size": 2}, TypeError, ["proj_size"]),
        ("RNN", {"nonlinearity": "gelu"}, ValueError, ["nonlinearity", "'tanh'", "'gelu'"]),
        ("LSTM", {"num_layers": 0}, ValueError, ["num_layers", "positive", "0"]),
        ("LSTM", {"dropout": 1.5}, ValueError, ["dropout", "0 to 1", "1.5"]),
        ("LSTM", {"dropout": True}, ValueError, ["dropout", "True"]),
        ("LSTM", {"bias": 1}, TypeError, ["bias", "bool", "int"]),
        ("LSTM", {"batch_first": "no"}, TypeError, ["batch_first", "bool", "str"]),
        ("LSTM", {"num_heads": 3}, ValueError, ["num_heads", "8", "3"]),
        ("LSTM", {"hidden_size": 0}, ValueError, ["hidden_size", "positive", "0"]),
        ("LSTM", {"input_size": -1}, ValueError, ["input_size", "positive", "-1"]),
    ],
)
def test_constructor_arguments_are_checked(kind, options, error, words):
    with pytest.raises(error) as caught:
        getattr(holdfast.nn, kind)(**{"input_size": INPUT, "hidden_size": HIDDEN, **options})
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("x", "hx", "error", "words"),
    [
        ([1.0], None, TypeError, ["input", "list"]),
        (torch.ones(4, 3, 6), None, ValueError, ["input", "[T, B, 5]", "[4, 3, 6]"]),
        (torch.ones(5), None, ValueError, ["input", "[T, 5]", "[5]"]),
        (pack_sequence([torch.ones(4, 6)]), None, ValueError, ["input", "5", "6"]),
        (torch.ones(4, 3, 5), torch.ones(1, 3, 8), TypeError, ["hx", "(h_0, c_0)", "Tensor"]),
        (torch.ones(4, 3, 5), (torch.ones(1, 3, 8), None), TypeError, ["c_0", "tensor", "NoneType"]),
        (
            torch.ones(4, 3, 5),
            (torch.ones(1, 3, 8), torch.ones(1, 2, 8)),
            ValueError,
            ["c_0", "[1, 3, 8]", "[1, 2, 8]"],
        ),
        (torch.ones(4, 5), (torch.ones(1, 1, 8),) * 2, ValueError, ["h_0", "[1, 8]", "[1, 1, 8]"]),
    ],
)
def test_calls_are_checked(x, hx, error, words):
    with pytest.raises(error) as caught:
        holdfast.nn.LSTM(INPUT, HIDDEN)(x, hx)
    assert all(word in str(caught.value) for word in words), str(caught.value)
