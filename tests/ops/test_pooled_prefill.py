"""Prompts packed on a pool of states: those of two calls, up to a block's end and on from there."""

from itertools import pairwise

import pytest
import torch

import holdfast
from holdfast.kernels.slots import read_states, write_states
from holdfast.ops import pooled_prefill, pooled_step, prefill_blocks
from holdfast.ops.delta_rules import repeats
from holdfast.ops.span_call import LINEAR, TIMED
from holdfast.recurrences import RECURRENCES, Draw, Sizes
from parity import relative_error

# of five sequences: one block and a tail, nothing, three blocks and a tail, less than a block, two blocks and no tail
BOUNDS, BLOCK, SLOTS = (0, 7, 7, 24, 27, 37), 5, 12
# the second sequence reads a slot that the first one writes, the fourth none
READ, WRITTEN, AT_BLOCKS = (3, 0, 3, -1, 6), (0, 1, 11, SLOTS, 4), (5, -1, 7, 8, 9, 10)
STATES = {"rglru": (6,), "rotlru": (6,), "hgrn": (6,)}


def drawn(name, dtype=torch.float64, wide=torch.float64, bounds=BOUNDS, seed=0):
    """Arguments of packed sequences, and a pool of states, of mlstm three."""
    sizes = Sizes(B=1, T=bounds[-1], H=4, Hq=2, K=8, V=6, D=6)
    arguments = RECURRENCES[name].example(Draw(seed, dtype), sizes)
    arguments.pop("initial_state", None)
    draw = Draw(seed + 1, torch.float64)
    pool = draw.normal(SLOTS, *STATES.get(name, (4, 8, 6))).to(wide)
    if name == "mlstm":
        m = draw.normal(SLOTS, 4).to(torch.promote_types(dtype, torch.float32))
        pool = pool, draw.normal(SLOTS, 4, 8).to(wide), m
    return arguments, pool


def parts_of(pool):
    return pool if isinstance(pool, tuple) else (pool,)


def like(pool, parts):
    """parts as the pool is: a tuple, or one."""
    return tuple(parts) if isinstance(pool, tuple) else parts[0]


def index(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def offsets(bounds=BOUNDS, dtype=torch.int64):
    return torch.tensor(bounds, dtype=dtype)


def cut(name, arguments, start, end):
    timed = TIMED[name]
    return {n: x[:, start:end] if n in timed and x.dim() in timed[n] else x for n, x in arguments.items()}


def in_series(name, arguments, start, end, state, block):
    """One sequence's outputs, the state behind each complete block, and the last, by the op, block after block."""
    outputs, states = [], []
    for begin in range(start, end, block):
        part, given = cut(name, arguments, begin, min(begin + block, end)), state if len(state) > 1 else state[0]
        o, after = getattr(holdfast, name)(**part, initial_state=given, output_final_state=True, backend="reference")
        outputs.append(o)
        state = parts_of(after)
        states += [state] * (begin + block <= end)
    return outputs, states, state


def expected(name, arguments, pool, slots, next_slots, block_slots, bounds=BOUNDS, block=BLOCK):
    """The outputs, and the pool after it, in its dtype."""
    before = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in parts_of(pool)]
    after, outputs, places = [x.clone() for x in parts_of(pool)], [], iter(block_slots)
    for (start, end), slot, following in zip(pairwise(bounds), slots, next_slots, strict=True):
        state = tuple(x[[slot]] if 0 <= slot < SLOTS else torch.zeros_like(x[:1]) for x in before)
        found, states, last = in_series(name, arguments, start, end, state, block)
        outputs += found
        for place, state in [*((next(places), state) for state in states), (following, last)]:
            for x, each in zip(after, state, strict=True):
                if 0 <= place < SLOTS:
                    x[place] = each[0].to(x.dtype)
    return torch.cat(outputs, 1), like(pool, after)


@pytest.fixture(params=["in series", "side by side"])
def form(request, monkeypatch):
    """Each of the two ways through the blocks, where no GPU chooses."""
    monkeypatch.setattr(prefill_blocks, "are_better_side_by_side", lambda *_: request.param == "side by side")


@pytest.mark.parametrize("name", LINEAR)
def test_blocks_are_those_of_calls_in_series(name, form):
    arguments, pool = drawn(name)
    right, after = expected(name, arguments, pool, READ, WRITTEN, AT_BLOCKS)
    o = pooled_prefill(
        name, arguments, pool, index(*READ), offsets(), index(*WRITTEN), block=BLOCK, block_slots=index(*AT_BLOCKS)
    )
    torch.testing.assert_close(o, right, rtol=0, atol=1e-10)
    torch.testing.assert_close(pool, after, rtol=0, atol=1e-10)
    # what no sequence names is as it was
    same = [n for n in range(SLOTS) if n not in (*WRITTEN, *AT_BLOCKS)]
    for x, right in zip(parts_of(pool), parts_of(after), strict=True):
        assert torch.equal(x[same], right[same])


@pytest.mark.parametrize("name", LINEAR)
def test_without_blocks_it_is_the_op(name):
    arguments, pool = drawn(name)
    right, after = expected(name, arguments, pool, READ, WRITTEN, [], block=100)
    o = pooled_prefill(name, arguments, pool, index(*READ), offsets(dtype=torch.int32), index(*WRITTEN))
    torch.testing.assert_close(o, right, rtol=0, atol=1e-10)
    torch.testing.assert_close(pool, after, rtol=0, atol=1e-10)


@pytest.mark.parametrize("block", [1, 3, 7, 20, 64])
@pytest.mark.parametrize("name", ["ssd", "kda", "rotlru"])
def test_one_sequence_of_any_blocks(name, block, form):
    bounds = (0, 20)
    arguments, pool = drawn(name, bounds=bounds)
    places = [n % 2 * (n + 1) - 1 for n in range(20 // block)]
    right, after = expected(name, arguments, pool, [2], [2], places, bounds, block)
    if block == 1:
        # of twenty blocks there is no slot for the last ones
        assert max(places) >= SLOTS
    o = pooled_prefill(name, arguments, pool, index(2), offsets(bounds), block=block, block_slots=index(*places))
    torch.testing.assert_close(o, right, rtol=0, atol=1e-10)
    torch.testing.assert_close(pool, after, rtol=0, atol=1e-10)


def test_a_prompt_that_goes_on_from_a_block():
    """The second half of a prompt, from the state that its first half's prefill left, is that of the whole."""
    arguments, pool = drawn("gated_delta_rule", bounds=(0, 20))
    whole = pooled_prefill(
        "gated_delta_rule", arguments, pool, index(-1), offsets((0, 20)), index(0), block=10, block_slots=index(1, 2)
    )
    o = pooled_prefill(
        "gated_delta_rule", cut("gated_delta_rule", arguments, 10, 20), pool, index(1), offsets((0, 10)), index(3)
    )
    torch.testing.assert_close(o, whole[:, 10:], rtol=0, atol=1e-12)
    torch.testing.assert_close(pool[3], pool[0], rtol=0, atol=1e-12)
    assert torch.equal(pool[0], pool[2])


@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("keys_last", [False, True])
def test_states_of_any_dtype_and_layout(wide, keys_last):
    arguments, pool = drawn("gated_delta_rule", torch.bfloat16, wide)
    right, after = expected("gated_delta_rule", arguments, pool, READ, WRITTEN, AT_BLOCKS)
    given = pool.mT.contiguous() if keys_last else pool
    o = pooled_prefill(
        "gated_delta_rule", arguments, given, index(*READ), offsets(), index(*WRITTEN),
        block=BLOCK, block_slots=index(*AT_BLOCKS), keys_last=keys_last,
    )  # fmt: skip
    assert o.dtype == torch.bfloat16
    assert relative_error(o, right) <= 4e-3
    found = given.mT if keys_last else given
    assert relative_error(found.float(), after.float()) <= (1e-6 if wide == torch.float32 else 2e-4)


@pytest.mark.parametrize("options", [{"gating": "sigmoid"}, {"gating": "sigmoid", "normalize": False}], ids=str)
@pytest.mark.parametrize("keys_last", [False, True])
def test_what_mlstm_does_not_use_goes_along(options, keys_last):
    arguments, pool = drawn("mlstm", torch.float32, torch.bfloat16)
    right, after = expected("mlstm", arguments | options, pool, READ, WRITTEN, AT_BLOCKS)
    given = pool[0].mT.contiguous() if keys_last else pool[0], *pool[1:]
    o = pooled_prefill(
        "mlstm", arguments | options, given, index(*READ), offsets(), index(*WRITTEN),
        block=BLOCK, block_slots=index(*AT_BLOCKS), keys_last=keys_last,
    )  # fmt: skip
    assert relative_error(o, right) <= 1e-5
    found = given[0].mT if keys_last else given[0], *given[1:]
    for x, y in zip(found, after, strict=True):
        assert relative_error(x.double(), y.double()) <= 2e-4
    assert torch.equal(given[2], after[2])


def test_pools_of_mlstm_are_three():
    arguments, pool = drawn("mlstm", torch.float32, torch.float32)
    rest = index(*READ), offsets()
    with pytest.raises(TypeError, match=r"pool: expected the tensors \(C, n, m\) of mlstm; got Tensor"):
        pooled_prefill("mlstm", arguments, pool[0], *rest)
    with pytest.raises(ValueError, match=r"pool\[1\]: expected shape \[12, 4, 8\]; got \[11, 4, 8\]"):
        pooled_prefill("mlstm", arguments, (pool[0], pool[1][:11], pool[2]), *rest)
    with pytest.raises(TypeError, match=r"pool\[2\]: expected float32 beside inputs of torch.float32; got"):
        pooled_prefill("mlstm", arguments, (*pool[:2], pool[2].to(torch.bfloat16)), *rest)


def test_a_pool_that_lies_in_another():
    arguments, pool = drawn("simple_gla")
    _, after = expected("simple_gla", arguments, pool, READ, WRITTEN, AT_BLOCKS)
    wider = torch.zeros(SLOTS, 8, 8, 12, dtype=torch.float64)
    view = wider[:, ::2, :, 3:9]
    view.copy_(pool)
    wider[:, 1::2] = torch.nan
    pooled_prefill("simple_gla", arguments, view, index(*READ), offsets(), index(*WRITTEN), BLOCK, index(*AT_BLOCKS))
    torch.testing.assert_close(view, after, rtol=0, atol=1e-10)
    assert wider[:, 1::2].isnan().all()
    assert not wider[:, ::2, :, :3].any()


def test_arguments_that_lie_in_a_projection():
    arguments, pool = drawn("gla")
    again = pool.clone()
    wide = torch.cat([x.flatten(2) for x in arguments.values()], -1)
    parts = wide.split([x.flatten(2).shape[2] for x in arguments.values()], -1)
    views = {n: part.view(x.shape) for (n, x), part in zip(arguments.items(), parts, strict=True)}
    rest = index(*READ), offsets(), index(*WRITTEN), BLOCK, index(*AT_BLOCKS)
    assert torch.equal(pooled_prefill("gla", arguments, pool, *rest), pooled_prefill("gla", views, again, *rest))
    assert torch.equal(pool, again)


def test_a_slot_that_is_not_read_may_hold_anything():
    arguments, pool = drawn("hgrn")
    pool[0] = torch.nan
    before = pool.clone()
    o = pooled_prefill("hgrn", arguments, pool, index(-1, SLOTS, -5, -1, -2), offsets())
    assert o.isfinite().all()
    assert torch.equal(pool[1:], before[1:])
    assert pool[0].isnan().all()
    assert pooled_prefill("hgrn", arguments, pool[:0], index(0, 1, 2, 3, 4), offsets()).isfinite().all()


def test_decoding_goes_on_from_it():
    arguments, pool = drawn("ssd", torch.float32, torch.float32, bounds=(0, 11))
    again = pool.clone()
    pooled_prefill("ssd", arguments, pool, index(2), offsets((0, 11)), block=4, block_slots=index(3, 4))
    prompt, token = cut("ssd", arguments, 0, 10), cut("ssd", arguments, 10, 11)
    pooled_prefill("ssd", prompt, again, index(2), offsets((0, 10)))
    pooled_step("ssd", token, again, index(2))
    torch.testing.assert_close(again[2], pool[2], rtol=0, atol=1e-5)


def test_options_of_the_op_and_no_gradient():
    arguments, pool = drawn("lightning")
    arguments = {n: x.requires_grad_() for n, x in arguments.items()}
    options = {"layer": 1, "num_layers": 4, "scale": 0.3}
    start = pool[[3, 0, 1, 2, 11]]
    right, last = holdfast.lightning(
        **arguments, **options, initial_state=start, output_final_state=True, cu_seqlens=offsets()
    )
    slots = index(3, 0, 1, 2, 11)
    o = pooled_prefill("lightning", arguments | options, pool, slots, offsets(), None, BLOCK, index(*AT_BLOCKS))
    assert not o.requires_grad
    torch.testing.assert_close(o, right, rtol=0, atol=1e-10)
    torch.testing.assert_close(pool[[3, 0, 1, 2, 11]], last, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"op": "lstm"}, ValueError, "op: expected one of"),
        ({"arguments": {"q": None}}, TypeError, "q: expected a tensor"),
        ({"more": {"depth": 3}}, TypeError, "arguments: expected names that gla takes; got 'depth'"),
        ({"more": {"initial_state": None}}, TypeError, "arguments: expected no initial_state"),
        ({"pool": None}, TypeError, "pool: expected a tensor; got NoneType"),
        ({"pool": torch.zeros(7, 4, 6, 8)}, ValueError, r"pool: expected shape \[slots, 4, 8, 6\]; got \[7, 4, 6, 8\]"),
        ({"keys_last": True}, ValueError, r"pool: expected shape \[slots, 4, 6, 8\]; got \[12, 4, 8, 6\]"),
        ({"pool": torch.zeros(7, 4, 8, 6)}, TypeError, "pool: expected float64 beside inputs of torch.float64; got"),
        ({"slots": index(0, 1)}, ValueError, r"slots: expected shape \[5\]; got \[2\]"),
        ({"slots": index(*READ).long()}, TypeError, "slots: expected torch.int32; got torch.int64"),
        ({"next_slots": index(0)}, ValueError, r"next_slots: expected shape \[5\]; got \[1\]"),
        ({"cu_seqlens": None}, TypeError, "cu_seqlens: expected a tensor; got NoneType"),
        ({"cu_seqlens": offsets((0, 9, 9, 20, 29, 36))}, ValueError, "cu_seqlens: expected offsets from 0 to T = 37"),
        ({"block": None}, ValueError, "block: expected one beside block_slots; got None"),
        ({"block_slots": None}, ValueError, "block_slots: expected one beside block; got None"),
        ({"block": 0}, ValueError, "block: expected 1 or more tokens; got 0"),
        ({"block": 2.5}, TypeError, "block: expected an integer; got float"),
        ({"block_slots": index(1, 2)}, ValueError, r"block_slots: expected shape \[6\]; got \[2\]"),
        ({"block_slots": [1]}, TypeError, "block_slots: expected a tensor; got list"),
        ({"keys_last": 1}, TypeError, "keys_last"),
        ({"backend": "scan"}, ValueError, "scan"),
    ],
)
def test_what_does_not_fit_is_said(change, error, said):
    op = change.get("op", "gla")
    arguments, pool = drawn(op)
    arguments = arguments | change.pop("more", {})
    before = pool.clone()
    given = {
        "op": op, "arguments": arguments, "pool": pool, "slots": index(*READ), "cu_seqlens": offsets(),
        "block": BLOCK, "block_slots": index(*AT_BLOCKS),
    }  # fmt: skip
    with pytest.raises(error, match=said):
        pooled_prefill(**given | change)
    assert torch.equal(pool, before)


def test_vectors_have_no_keys():
    arguments, pool = drawn("rglru")
    with pytest.raises(ValueError, match="keys_last: expected False, as a state of rglru has no keys; got True"):
        pooled_prefill("rglru", arguments, pool, index(*READ), offsets(), keys_last=True)
    arguments = {n: x.expand(2, -1, -1) for n, x in arguments.items()}
    with pytest.raises(ValueError, match="cu_seqlens: expected packed inputs with B = 1; got B = 2"):
        pooled_prefill("rglru", arguments, pool, index(*READ), offsets())


@pytest.mark.parametrize("axis", [1, 3])
def test_keys_that_repeat_in_memory_are_known_by_it(axis, form):
    """Of one direction, in bfloat16: the rule takes them in float32, whatever the order of the tokens is."""
    arguments, pool = drawn("delta_rule", torch.bfloat16, torch.float32)
    one = {1: arguments["k"][:, :1], 3: torch.full((1, 37, 2, 1), 8**-0.5, dtype=torch.bfloat16)}[axis]
    arguments["k"] = one.expand(1, 37, 2, 8)
    tokens = torch.arange(36, -1, -1)
    assert torch.equal(prefill_blocks.reordered(arguments["k"], tokens), arguments["k"].flip(1))
    assert repeats(prefill_blocks.reordered(arguments["k"], tokens))
    right, after = expected("delta_rule", arguments, pool, READ, WRITTEN, AT_BLOCKS)
    o = pooled_prefill(
        "delta_rule", arguments, pool, index(*READ), offsets(), index(*WRITTEN), BLOCK, index(*AT_BLOCKS)
    )
    assert relative_error(o, right) <= 4e-3
    assert relative_error(pool, after) <= 1e-6


def test_when_blocks_are_taken_side_by_side():
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert prefill_blocks.are_better_side_by_side(gpu, 64 * 32 * 128, 100)
    assert prefill_blocks.are_better_side_by_side(gpu, 64 * 32 * 128, 9)
    assert not prefill_blocks.are_better_side_by_side(cpu, 64 * 32 * 128, 100)
    # enough work in each, or a few of them
    assert not prefill_blocks.are_better_side_by_side(gpu, 512 * 32 * 128, 100)
    assert not prefill_blocks.are_better_side_by_side(gpu, 64 * 32 * 128, 8)


@pytest.mark.gpu
@pytest.mark.parametrize("name", LINEAR)
def test_on_a_gpu(name, form):
    """By kernels, in bfloat16, with as small an error as the op has of whole sequences."""
    bounds, block = (0, 700, 700, 741, 997), 128
    arguments, pool = drawn(name, torch.bfloat16, torch.float32, bounds)
    exact = {n: x.double() for n, x in arguments.items()}
    read, written, places = (3, 0, 3, -1), (0, 1, SLOTS, 4), (5, -1, 6, 7, 8, 9, 10)
    wide = like(pool, [x.double() for x in parts_of(pool)])
    right, after = expected(name, exact, wide, read, written, places, bounds, block)
    arguments = {n: x.cuda() for n, x in arguments.items()}
    state = [x[[3, 0, 3, 3]].float() for x in parts_of(pool)]
    for x in state:
        x[3] = 0
    o, last = getattr(holdfast, name)(
        **arguments, initial_state=like(pool, [x.cuda() for x in state]), output_final_state=True,
        cu_seqlens=offsets(bounds).cuda(),
    )  # fmt: skip
    given = like(pool, [x.cuda() for x in parts_of(pool)])
    found = pooled_prefill(
        name, arguments, given, index(*read).cuda(), offsets(bounds).cuda(), index(*written).cuda(),
        block=block, block_slots=index(*places).cuda(),
    )  # fmt: skip
    assert relative_error(found.cpu(), right) <= 2 * relative_error(o.cpu(), right)
    for mine, ops, exactly, before in zip(*map(parts_of, (given, last, after, pool)), strict=True):
        mine, limit = mine.cpu(), 2 * relative_error(ops.cpu()[[0, 1, 3]], exactly[[0, 1, 4]])
        assert relative_error(mine[[0, 1, 4]], exactly[[0, 1, 4]]) <= limit
        assert relative_error(mine[5:11], exactly[5:11]) <= max(limit, 4e-3)
        assert torch.equal(mine[[2, 3, 11]], before[[2, 3, 11]])


@pytest.mark.gpu
def test_on_a_gpu_slots_are_not_read_on_the_host():
    pool = torch.zeros(5, 2, 3, 4, device="cuda")
    states, slots = torch.ones(3, 2, 3, 4, device="cuda"), index(4, -1, 2).cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        write_states(pool, slots, states)
        found = read_states(pool, slots, torch.float32)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found.amax((1, 2, 3)).tolist() == [1, 0, 1]
    assert pool.amin((1, 2, 3)).tolist() == [0, 0, 1, 0, 1]
