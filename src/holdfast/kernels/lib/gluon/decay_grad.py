"""The partition that turns the row sums of a backward pass into dg and dbeta.

The log decay's gradient is dg_t = <exp(g_t) S_{t-1}, dS_t>: all pairs of a token written before t and one that reads it
from t on. They are summed apart, each from the side where it is small, so that an error stays with few tokens:
    pairs of one chunk, from the products of scores in float32, without a token's pair with itself;
    q . dq of what entered the chunk, from its end to t;  k . dk of what leaves it, from its start to t;
    what passes the whole chunk, <decay S, dS>, one number a chunk.
The last is known exactly for the last chunk, of which a final state's gradient may make all of dg. It is known as
<S, dS> at a chunk's start less the sum of q . dq where the kernel for dq saved a state. Between two of those it is
carried on, a sum's end less the chunk's k . dk and then plus its q . dq, whose rounding adds up and is the same for all
tokens of a chunk. So it is smoothed (Rauch, Tung, Striebel 1965): what carries it on errs by ROUNDING of <S, dS>, its
size is about the decay's share of that, and a saved state shows by how much it has strayed.
"""

from typing import NamedTuple

from .compat import gl, gluon, mbarrier
from .decay import CHUNK, load_decay_beta, prefetch_decay_beta
from .pdl import grid_dependency_wait
from .reduce import add, reduce_warp_partials
from .sequence import segment_index

# below this log decay, to base 2, the decay is 0 in float32, and so is its gradient
_LOG_ZERO = gl.constexpr(-149.9)


class RowSums(NamedTuple):
    """Row sums of a chunk that the mma partition leaves in shared memory, by stage and warp.

    later, earlier: pairs of the chunk, by the token that reads and by the one that writes. own: a token with itself, or
    None without dbeta. cross: k . dk of what later chunks read. state [STAGES * 2, K]: products of a saved state and
    the state's gradient, as it is and rounded.
    """

    later: gl.shared_memory_descriptor
    earlier: gl.shared_memory_descriptor
    own: gl.shared_memory_descriptor
    cross: gl.shared_memory_descriptor
    state: gl.shared_memory_descriptor


class SmoothingWindow(NamedTuple):
    """The chunks since the last saved state, in shared memory; None without saved states.

    dg: [SAVE - 1, CHUNK]. gains: [SAVE * 2 - 2, 1], of each chunk its gain and its innovation.
    """

    dg: gl.shared_memory_descriptor
    gains: gl.shared_memory_descriptor


class DecayGradBuffers(NamedTuple):
    """Shared memory of the partition.

    decays_ready: counts this partition too, which has read a stage's row sums before others take their place. empty:
    the mma partition has left a stage's row buffers.sums.
    """

    decays_ready: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    sums: RowSums
    window: SmoothingWindow


class DecayGradTensors(NamedTuple):
    """Where the head's first token is: g and beta, and dg and dbeta or None.

    g_t: stride of a natural-log g; None of one to base 2, which has stride 1. entered: q . dq of what entered the
    chunks, by token, in parts. passing [parts, B, segments, H]: parts of <S, dS>, S before and dS after each segment's
    last chunk, or None for 0. final_product [B, segments, H]: <S, dS> after each segment, written, or None.
    """

    g: gl.tensor
    beta: gl.tensor
    g_t: gl.tensor
    beta_t: gl.tensor
    entered: gl.tensor
    passing: gl.tensor
    dg: gl.tensor
    dbeta: gl.tensor
    final_product: gl.tensor


class DecayGradSizes(NamedTuple):
    """length: tokens of the sequence. part_size: from one part of `entered` to the next. grad_t: stride of dg, dbeta.

    first, count: the segment's chunks.
    """

    length: gl.tensor
    part_size: gl.tensor
    H: gl.tensor
    grad_t: gl.tensor
    parts: gl.tensor
    first: gl.tensor
    count: gl.tensor


@gluon.jit
def load_log2_decay_beta(g_ptr, beta_ptr, beta_t, chunk, is_inside, T):
    """Load a chunk's log decays to base 2, as the kernel for dq left them, and beta; nothing unless is_inside."""
    g, beta = prefetch_decay_beta(g_ptr, beta_ptr, 1, beta_t, chunk, is_inside, T)
    return g, beta.to(gl.float32)


@gluon.jit
def decay_grad_partition(
    buffers,
    tensors,
    sizes,
    TRANSPOSED: gl.constexpr,
    SAVE: gl.constexpr,
    FROM: gl.constexpr,
    ROUNDING: gl.constexpr,
    FIRST_EXACT: gl.constexpr,
):
    """Turn the row sums of each chunk, from the last to the first, into dg and dbeta.

    SAVE: chunks from one saved state to the next. FROM: the first chunk with one. ROUNDING: the variance of one
    number's rounding, relative to its square. TRANSPOSED: the sums of `entered` are not of numbers rounded as here.
    FIRST_EXACT: the first chunk's product of states is of the gradient behind the chunk, and so what passes it, but for
    its decay.
    """
    STAGES: gl.constexpr = buffers.sums.earlier.shape[0]
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    rows: gl.constexpr = gl.BlockedLayout([buffers.sums.state.shape[1] // 32], [32], [1], [0])
    # nothing has been left in a stage yet that would have to be read first
    for i in gl.static_range(STAGES):
        mbarrier.arrive(buffers.decays_ready.index(i), count=1, pred=i < sizes.count)
    grid_dependency_wait()
    passing = 0.0
    if tensors.passing is not None:  # noqa: SIM102 - known while compiling
        if sizes.count > 0:
            for part in range(sizes.parts):
                size = gl.num_programs(0) * gl.num_programs(1)
                passing += gl.load(tensors.passing + part * size + segment_index(sizes.H, 1))
    # <S, dS> at a chunk's end, and the variance of its error, relative to its square
    carry = 0.0
    variance = 0.0
    stage = 0
    phase = 0
    for i in range(sizes.count):
        slot = sizes.count - 1 - i
        # loaded before the wait
        tokens = (sizes.first + slot) * CHUNK + gl.arange(0, CHUNK, layout)
        inside = tokens < sizes.length
        if tensors.dg is not None:
            entered = gl.load(tensors.entered + tokens, mask=inside, other=0.0)
            for part in range(1, sizes.parts):
                entered += gl.load(tensors.entered + part * sizes.part_size + tokens, mask=inside, other=0.0)
        if tensors.g_t is None:
            g, beta = load_log2_decay_beta(
                tensors.g, tensors.beta, tensors.beta_t, sizes.first + slot, True, sizes.length
            )
        else:
            g, beta = load_decay_beta(
                tensors.g, tensors.beta, tensors.g_t, tensors.beta_t, sizes.first + slot, True, sizes.length
            )
        mbarrier.wait(buffers.empty.index(stage), phase)
        earlier = reduce_warp_partials(buffers.sums.earlier, stage)
        cross = reduce_warp_partials(buffers.sums.cross, stage)
        if tensors.dbeta is not None:
            own = reduce_warp_partials(buffers.sums.own, stage)
        if tensors.dg is not None:
            pairs = reduce_warp_partials(buffers.sums.later, stage)
            saved = 0.0
            saved_rounded = 0.0
            if SAVE > 0:  # noqa: SIM102 - known while compiling
                if slot % SAVE == 0:
                    saved = gl.sum(buffers.sums.state.index(stage * 2).load(rows), 0)
                    saved_rounded = gl.sum(buffers.sums.state.index(stage * 2 + 1).load(rows), 0)
        # they have been read, so that the chunk that takes the stage may leave its own
        mbarrier.arrive(buffers.decays_ready.index(stage), count=1, pred=i + STAGES < sizes.count)
        if tensors.dbeta is not None:
            gl.store(tensors.dbeta + tokens.to(gl.int64) * sizes.grad_t, earlier + cross + own, mask=inside)
        if tensors.dg is not None:
            pairs -= earlier * beta
            cross *= beta
            dg = gl.associative_scan(entered + pairs, 0, add, reverse=True)
            dg += gl.associative_scan(cross, 0, add) - cross
            # what passes the chunk: the sum that is carried on, and that it is about the decay of the whole
            decay = gl.exp2(gl.sum(g, 0))
            expected = carry - gl.sum(cross, 0)
            read = gl.sum(entered, 0)
            # no pair is of a token before the first and one from it on: their sum there is rounding
            dg = gl.where(gl.arange(0, CHUNK, layout) == 0, read, dg)
            predicted = variance + ROUNDING
            gain = decay * decay / (decay * decay + predicted)
            # of the next chunk's error, the share that is this one's too
            rts_gain = variance / predicted
            # what passes the last chunk is known exactly
            if tensors.final_product is not None:  # noqa: SIM102 - known while compiling
                if i == 0:
                    gl.store(tensors.final_product + segment_index(sizes.H, 1), decay * passing + gl.sum(cross, 0))
            variance = gl.where(i == 0, 0.0, predicted * gain)
            past = gl.where(i == 0, decay * passing, expected * gain)
            carry = read + past
            if slot % SAVE == 0:
                if TRANSPOSED:
                    past += variance / (variance + ROUNDING) * (saved - carry)
                else:
                    past = gl.where((i > 0) & (decay > 0.0), saved - read, past)
                if FIRST_EXACT:
                    past = gl.where(slot == 0, decay * saved, past)
                # nothing passes from a first state of 0
                past = gl.where(slot >= FROM, past, 0.0)
                carry = saved_rounded
                variance = ROUNDING * 1.0
            innovation = past - expected
            dg = gl.where(g < _LOG_ZERO, 0.0, dg + past)
            if slot % SAVE == 0:
                gl.store(tensors.dg + tokens.to(gl.int64) * sizes.grad_t, dg, mask=inside)
                _smooth_backward(
                    buffers.window, rts_gain, innovation, tensors.dg, tokens, sizes.length, sizes.grad_t, i
                )
            else:
                one = gl.full([1], 1.0, gl.float32, layout)
                buffers.window.dg.index(slot % SAVE - 1).store(dg)
                buffers.window.gains.index(slot % SAVE * 2 - 2).store(one * rts_gain)
                buffers.window.gains.index(slot % SAVE * 2 - 1).store(one * innovation)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def _smooth_backward(window, rts_gain, innovation, dg_ptr, tokens, length, grad_t, entry):
    """Write dg of the chunks after one with a saved state, with their share of the error that it shows."""
    SAVE: gl.constexpr = window.dg.shape[0] + 1
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    # the last window of a segment has fewer
    for slot in range(1, gl.minimum(SAVE, entry + 1)):
        error = rts_gain * innovation
        later = tokens + slot * CHUNK
        gl.store(
            dg_ptr + later.to(gl.int64) * grad_t, window.dg.index(slot - 1).load(layout) + error, mask=later < length
        )
        rts_gain = gl.sum(window.gains.index(slot * 2 - 2).load(layout), 0)
        innovation = error + gl.sum(window.gains.index(slot * 2 - 1).load(layout), 0)
