"""mlstm_kernels' functions, held against mLSTM's equations a step at a time in float64."""

import sys
from importlib import import_module
from inspect import signature

import pytest
import torch
import torch.nn.functional as F

from holdfast.integrations import mlstm_kernels
from holdfast.integrations.mlstm_kernels import torch as kernels
from holdfast.integrations.mlstm_kernels.torch.backend_module import mLSTMBackend, mLSTMBackendConfig

EXPONENTIAL = [name for name in kernels.get_available_mlstm_kernels() if "siging" not in name]
SIGMOID = [name for name in kernels.get_available_mlstm_kernels() if "siging" in name]
# batch, heads, tokens, K and V of the package's own tests
SIZES = [(1, 2, 256, 64, 128), (4, 2, 256, 24, 48), (1, 1, 93, 16, 32), (1, 1, 7, 16, 32)]


def drawn(batch=2, heads=3, tokens=9, K=4, V=6, dtype=torch.float32):
    q, k = torch.randn(2, batch, heads, tokens, K, dtype=torch.float64).unbind()
    v = torch.randn(batch, heads, tokens, V, dtype=torch.float64)
    i, f = torch.randn(2, batch, heads, tokens, dtype=torch.float64).unbind()
    return [x.to(dtype).requires_grad_() for x in (q, k, v, i, f + 3)]


def drawn_states(batch=2, heads=3, K=4, V=6, dtype=torch.float32):
    shapes = ((batch, heads, K, V), (batch, heads, K), (batch, heads, 1))
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def stepped(q, k, v, i, f, c=None, n=None, m=None, eps=1e-6, sigmoid=False, normalize=True):
    """h [B, H, T, V] and c, n, m behind the last token, in float64."""
    q, k, v, i, f = (x.double() for x in (q, k, v, i, f))
    (batch, heads, tokens, K), V = q.shape, v.shape[-1]
    c = q.new_zeros(batch, heads, K, V) if c is None else c.double()
    n = q.new_zeros(batch, heads, K) if n is None else n.double()
    m = q.new_zeros(batch, heads, 1) if m is None else m.double()
    found = []
    for t in range(tokens):
        decay, write = F.logsigmoid(f[:, :, t, None]), i[:, :, t, None]
        if sigmoid:
            m, decay, write = torch.zeros_like(m), decay.exp(), write.sigmoid()
        else:
            highest = torch.maximum(decay + m, write)
            m, decay, write = highest, (decay + m - highest).exp(), (write - highest).exp()
        c = decay[..., None] * c + write[..., None] * k[:, :, t, :, None] * v[:, :, t, None]
        n = decay * n + write * k[:, :, t]
        read = K**-0.5 * q[:, :, t]
        below = torch.maximum((read * n).sum(-1, keepdim=True).abs(), (-m).exp()) + eps
        found.append((read[..., None] * c).sum(-2) / (below if normalize else 1))
    return torch.stack(found, 2), (c, n, m)


def assert_close(found, right, tolerance=1e-4):
    torch.testing.assert_close(found.double(), right.double(), rtol=tolerance, atol=tolerance)


def gradients(h, states, leaves):
    total = h.double().sin().sum() + sum(x.double().cos().sum() for x in states)
    return torch.autograd.grad(total, leaves)


TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("sizes", SIZES)
def test_outputs_and_gradients(sizes, dtype):
    given = drawn(*sizes, dtype)
    right = stepped(*given)[0]
    wanted = gradients(right, (), given)
    for name in ("chunkwise--native_autograd", "parallel--native_stablef_custbw"):
        found = kernels.get_mlstm_kernel(name)(*given)
        assert found.dtype == dtype
        assert_close(found, right, TOLERANCE[dtype])
        for got, each in zip(gradients(found, (), given), wanted, strict=True):
            # of all elements: n . q comes near 0 where it likes, and what is divided by it magnifies a rounding
            assert (got - each).norm() <= TOLERANCE[dtype] * each.norm()


@pytest.mark.parametrize("name", [name for name in EXPONENTIAL if "chunkwise" in name])
def test_from_states_to_states(name):
    given, states = drawn(dtype=torch.float64), drawn_states(dtype=torch.float64)
    kernel = kernels.get_mlstm_kernel(name)
    right, after = stepped(*given, *states, eps=0.1)
    h, last = kernel(*given, *states, return_last_states=True, eps=0.1, chunk_size=3)
    assert_close(h, right, 1e-10)
    for found, wanted in zip(last, after, strict=True):
        assert found.is_contiguous()
        assert_close(found, wanted, 1e-10)
    leaves = [*given, *states]
    for got, wanted in zip(gradients(h, last, leaves), gradients(right, after, leaves), strict=True):
        assert_close(got, wanted, 1e-9)
    assert_close(kernel(*given, *states), stepped(*given, *states)[0], 1e-10)
    # one that is left out is 0, and m may have no axis of its own
    c, _, m = states
    assert_close(kernel(*given, c, None, m[..., 0]), stepped(*given, c, None, m)[0], 1e-10)


@pytest.mark.parametrize("name", ["chunkwise--triton_xl_chunk", "parallel--native_autograd"])
def test_no_token_at_all(name):
    given, states = drawn(tokens=0), drawn_states()
    kernel = kernels.get_mlstm_kernel(name)
    assert kernel(*given).shape == (2, 3, 0, 6)
    if "chunkwise" in name:
        _, last = kernel(*given, *states, return_last_states=True)
        assert all(map(torch.equal, last, states))


@pytest.mark.parametrize("name", SIGMOID)
@pytest.mark.parametrize("normalize", [True, False])
def test_a_sigmoid_input_gate(name, normalize):
    given = drawn(dtype=torch.float64)
    right, after = stepped(*given, eps=0.1, sigmoid=True, normalize=normalize)
    kernel = kernels.get_mlstm_kernel(name)
    found = kernel(*given, eps=0.1, normalize=normalize)
    assert_close(found, right, 1e-10)
    for got, wanted in zip(gradients(found, (), given), gradients(right, (), given), strict=True):
        assert_close(got, wanted, 1e-9)
    if "chunkwise" in name:
        h, (c, n) = kernel(*given, eps=0.1, normalize=normalize, return_last_states=True)
        assert torch.equal(h, found)
        assert_close(c, after[0], 1e-10)
        assert_close(n, after[1] if normalize else torch.zeros_like(n), 1e-10)


@pytest.mark.parametrize("name", kernels.get_available_mlstm_kernels())
def test_the_others_are_the_same(name):
    given = drawn()
    first = "chunkwise--triton_xl_chunk_siging" if name in SIGMOID else "chunkwise--native_custbw"
    assert torch.equal(kernels.get_mlstm_kernel(name)(*given), kernels.get_mlstm_kernel(first)(*given))


def test_eps_of_the_parallel_kernels():
    """Theirs stands beside exp(-m) of an m from the first token's on, not from 0 on."""
    q, k, v, i, f = drawn(dtype=torch.float64)
    given, eps = (q, k, v, i - 4, f - 6), 0.1
    unbounded = torch.full((2, 3, 1), -torch.inf, dtype=torch.float64)
    right = stepped(*given, m=unbounded, eps=eps)[0]
    ratio = right / kernels.get_mlstm_kernel("parallel--native_autograd")(*given, eps=eps)
    assert ratio.min() > 1 / (1 + eps)
    assert ratio.max() < 1 + eps
    assert ratio.max() - ratio.min() > 0.01


@pytest.mark.parametrize("name", kernels.get_available_mlstm_sequence_kernels())
def test_sequences_for_decoding(name):
    given, states = drawn(), drawn_states()
    kernel = kernels.get_mlstm_sequence_kernel(name)
    right, after = stepped(*given, *states)
    assert_close(kernel(*given, *states), right)
    h, last = kernel(*given, *states, return_last_states=True, dtype_state=torch.bfloat16)
    assert_close(h, right)
    for found, wanted in zip(last, after, strict=True):
        assert found.dtype == torch.bfloat16
        assert_close(found, wanted, 1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("name", kernels.get_available_mlstm_step_kernels())
def test_a_token(name, recorded, dtype):
    given, states = drawn(tokens=1), drawn_states()
    right, after = stepped(*given, *states, eps=0.1)
    before = [x.detach().clone() for x in states]
    tokens = [*(x[:, :, 0] for x in given[:3]), *given[3:], *states]
    if not recorded:
        tokens = [x.detach() for x in tokens]
    h, last = kernels.get_mlstm_step_kernel(name)(*tokens, eps=0.1, dtype_state=dtype)
    assert_close(h, right[:, :, 0])
    for found, wanted in zip(last, after, strict=True):
        assert found.dtype == dtype
        assert_close(found, wanted, 1e-4 if dtype == torch.float32 else 1e-2)
    assert all(map(torch.equal, states, before))
    if recorded and dtype == torch.float32:
        leaves = [*given, *states]
        wanted = gradients(right[:, :, 0], after, leaves)
        for got, each in zip(gradients(h, last, leaves), wanted, strict=True):
            assert_close(got, each)


@pytest.mark.parametrize("name", EXPONENTIAL)
def test_the_module_trains(name):
    given = drawn()
    config = mLSTMBackendConfig(name, return_last_states=False, eps=0.1)
    right, after = stepped(*given, eps=0.1)
    module = mLSTMBackend(config)
    assert_close(module(*given), right)
    if "parallel" in name:
        with pytest.raises(ValueError, match="return_last_states: expected False"):
            module(*given, return_last_states=True)
    else:
        h, last = mLSTMBackend(mLSTMBackendConfig(name, eps=0.1))(*given)
        assert_close(h, right)
        for found, wanted in zip(last, after, strict=True):
            assert_close(found, wanted)
    padded = mLSTMBackend(mLSTMBackendConfig(name, return_last_states=False, mode="train_with_padding", eps=0.1))
    assert_close(padded(*given), right)
    with pytest.raises(ValueError, match="return_last_states: expected False with mode='train_with_padding'"):
        padded(*given, return_last_states=True)


@pytest.mark.parametrize("normalize", [True, False])
def test_the_module_with_a_sigmoid_input_gate(normalize):
    given, name = drawn(), "chunkwise--triton_xl_chunk_siging"
    module = mLSTMBackend(mLSTMBackendConfig(name, normalize_siging=normalize))
    right, (c, _, _) = stepped(*given, sigmoid=True, normalize=normalize)
    h, last = module(*given)
    assert_close(h, right)
    assert len(last) == 2
    assert_close(last[0], c)
    with pytest.raises(ValueError, match="mode: expected training with chunkwise_kernel='chunkwise--triton_xl_chunk_s"):
        module(*given, mode="inference")


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_the_module_decodes(state_dtype):
    given = [x.detach() for x in drawn(tokens=43)]
    right, after = stepped(*given)
    module = mLSTMBackend(mLSTMBackendConfig("chunkwise--triton_xl_chunk", mode="inference", chunk_size=16,
                                             inference_state_dtype=state_dtype))  # fmt: skip
    tolerance = 1e-4 if state_dtype == "float32" else 5e-2
    h, states = module(*(x[:, :, :40] for x in given), return_last_states=False)
    found = [h]
    for t in range(40, 43):
        h, states = module(*(x[:, :, t : t + 1] for x in given), *states)
        found.append(h)
    # states that were rounded leave their error in h
    assert_close(torch.cat(found, 2), right, tolerance)
    for got, wanted in zip(states, after, strict=True):
        assert got.dtype == getattr(torch, state_dtype)
        assert_close(got, wanted, tolerance)


def test_autocast():
    given = drawn()
    half = [*(x.half() for x in given[:3]), *given[3:]]
    kernel = kernels.get_mlstm_kernel("chunkwise--triton_xl_chunk")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = kernel(*given, autocast_kernel_dtype=torch.float16)
        whole = kernel(*given)
    assert torch.equal(found, kernel(*half))
    assert torch.equal(whole, kernel(*given))
    module = mLSTMBackend(mLSTMBackendConfig(mode="inference", autocast_kernel_dtype="float16"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(module(*given)[0], found)


def test_what_is_not_served():
    given, states = drawn(), drawn_states()
    chunkwise, parallel = (kernels.get_mlstm_kernel(f"{name}--native_custbw") for name in ("chunkwise", "parallel"))
    step = kernels.get_mlstm_step_kernel("native")
    tokens = [*(x[:, :, 0] for x in given[:3]), *(x[:, :, :1] for x in given[3:])]
    c, n, m = states
    for call, message in (
        (lambda: chunkwise(*given, n), r"c_initial: expected shape \[B=2, H=3, K=4, V=6\]; got \[2, 3, 4\]"),
        (lambda: chunkwise(*given, c, n, m[:1]), r"m_initial: expected shape \[B=2, H=3, 1=1\] or"),
        (lambda: chunkwise(*given, chunk_size=0), "chunk_size: expected a positive int; got 0"),
        (lambda: chunkwise(*given, autocast_kernel_dtype=torch.int8), "autocast_kernel_dtype: expected one of"),
        (lambda: chunkwise(*given, return_last_states=1), "return_last_states: expected a bool"),
        (lambda: chunkwise(*given, eps=-1), "eps: expected a finite number >= 0"),
        (lambda: chunkwise(*given, qk_scale=1.0), "unexpected keyword argument 'qk_scale'"),
        (lambda: chunkwise(given[0].transpose(1, 2), *given[1:]), r"k: expected shape \[B=2, H=9, T=3, K=4\]; got"),
        (lambda: parallel(*given, *states), "c_initial: expected None, as the chunkwise kernels alone take states"),
        (lambda: parallel(*given, return_last_states=True), "return_last_states: expected False"),
        (lambda: step(*tokens, c, n, None), "m: expected a tensor"),
        (lambda: step(*tokens, c, n, m, dtype_state=torch.int8), "dtype_state: expected one of"),
        (lambda: step(*given, *states), r"q: expected shape \[B, H, K\]; got \[2, 3, 9, 4\]"),
        (lambda: kernels.get_mlstm_kernel("native"), "name: expected one of 'chunkwise--native_autograd'.*; got 'nat"),
        (lambda: kernels.get_mlstm_step_kernel("x"), "name: expected one of 'native', 'triton'; got 'x'"),
        (lambda: kernels.get_mlstm_sequence_kernel("x"), "name: expected one of 'native_sequence__native', "),
        (lambda: mLSTMBackendConfig(mode="eval"), "mode: expected one of 'train', .*; got 'eval'"),
        (lambda: mLSTMBackendConfig(inference_state_dtype="fp8"), "inference_state_dtype: expected one of float32, "),
        (lambda: mLSTMBackendConfig("parallel--native_autograd"), "return_last_states: expected False with a parallel"),
        (lambda: mLSTMBackend(mLSTMBackendConfig("chunkwise--x")), "name: expected one of"),
        (lambda: mLSTMBackend(mLSTMBackendConfig())(*given, mode="eval"), "mode: expected one of"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            call()


def test_the_module_is_called_as_there():
    names = ["self", "q", "k", "v", "i", "f", "c_initial", "n_initial", "m_initial", "return_last_states", "mode"]
    assert list(signature(mLSTMBackend.forward).parameters) == names
    assert mLSTMBackend.config_class is mLSTMBackendConfig
    assert "chunk_size=64" in repr(mLSTMBackend(mLSTMBackendConfig()))


def test_in_the_package_s_place(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "mlstm_kernels"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mlstm_kernels", mlstm_kernels)
    try:
        found = import_module("mlstm_kernels.torch.backend_module")
        assert_close(found.mLSTMBackend(found.mLSTMBackendConfig())(*(given := drawn()))[0], stepped(*given)[0])
        assert import_module("mlstm_kernels.torch.chunkwise.triton_xl_chunk").mlstm_chunkwise__xl_chunk
    finally:
        for name in [name for name in sys.modules if name.startswith("mlstm_kernels.")]:
            del sys.modules[name]
