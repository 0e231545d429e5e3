"""The barrier of all blocks of a cooperative launch, in two halves, and what lets TMA take part in an exchange.

It is what CUDA's grid.sync() is made of: the driver gives each cooperative launch a word of its own, which needs no
clearing and which no other launch, stream or graph shares.
"""

from .compat import barrier, gl, gluon


@gluon.jit
def tma_store_wait_written():
    """Wait until what this thread stored by TMA is in global memory; tma_store_wait only sees that it was read."""
    gl.inline_asm_elementwise("cp.async.bulk.wait_group 0; // $0", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def fence_generic_to_async():
    """Let TMA see what ordinary stores have written, this block's or those of another that has arrived."""
    gl.inline_asm_elementwise("fence.proxy.async; // $0", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _grid_word():
    """Return the place of the launch's word: CUDA's cooperative_groups/details/driver_abi.h reads these registers."""
    workspace = gl.inline_asm_elementwise(
        "{ .reg .b32 low, high; mov.u32 low, %envreg2; mov.u32 high, %envreg1; mov.b64 $0, {low, high}; }",
        "=l",
        [],
        gl.int64,
        is_pure=False,
        pack=1,
    )
    return (workspace + 4).to(gl.pointer_type(gl.int32))


@gluon.jit
def grid_phase():
    """Return the word, whose highest bit stays as it is until all blocks have arrived."""
    return gl.load(_grid_word(), volatile=True)


@gluon.jit
def grid_arrive():
    """Count this block in, after all that its warps here have written."""
    barrier()
    blocks = gl.num_programs(0) * gl.num_programs(1)
    # all together turn the highest bit and leave the others as they were
    share = gl.where(gl.program_id(0) + gl.program_id(1) == 0, -2147483647 - blocks, 1)
    gl.atomic_add(_grid_word(), share, sem="release", scope="gpu")


@gluon.jit
def grid_wait(before):
    """Wait until all blocks have arrived since the highest bit was that of `before`. Traps after some seconds."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred early, tired;
        .reg .b32 polls;
        mov.b32 polls, 0;
        WAIT:
        ld.acquire.gpu.global.b32 $0, [$1];
        xor.b32 $0, $0, $2;
        setp.ge.s32 early, $0, 0;
        add.s32 polls, polls, 1;
        setp.gt.s32 tired, polls, 0x800000;
        @tired trap;
        @early bra WAIT;
        }""",
        "=&r,l,r",
        [_grid_word().to(gl.int64), before],
        gl.int32,
        is_pure=False,
        pack=1,
    )
    barrier()
