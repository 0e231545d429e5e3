"""The delta rule in Triton: launches over all chunks at once, and walks with the state in registers."""

from dataclasses import replace

from holdfast.planner import Candidate, Device, Direction, Grid, Plan, Problem
from holdfast.planner.constrint import Expression, Integer, as_expression, ceil_div, maximum, minimum, truth
from holdfast.planner.kernel_model import Assignment, Kernel, KernelModel, planned, powers_of_two
from holdfast.planner.models.matrix.tiles import padded

# wider states leave no registers for anything else
WIDEST = 256
# of the state, in float32 a thread
STATE_REGISTERS = 64
# Rounded gradients of the states are kept for one part of the sequence at a time, of at most so many bytes beside the
# other tensors of the call: 64 MiB at B4 T4096 H32 D128.
KEPT_BYTES = 64 << 20
# Fitted to both passes as a whole on an H200 (gated, K = V = 128, bfloat16: B4 T4096 H32, B1 T4096 H16, B1 T32768 H8);
# no launch was timed by itself. Of a walk's chunk: its products wait for one another, so long whatever their size, and
# a rate for each warp.
CHUNK_SECONDS = {"forward": 1.8e-6, "states": 1.2e-6, "reverse": 2.1e-6}
WARP_RATE = 3.6e11
STAGE_FACTORS = {3: 1.0, 2: 1.05, 1: 1.45}
# a block of the launches over all chunks, from its first load to its last store
PREPARE_SECONDS, GRADIENT_SECONDS = 8e-6, 2.4e-5


def states_fit_gradients(length: int, columns: int, chunk: int) -> bool:
    """Whether each chunk's rounded state fits where its gradients of q and k will be written."""
    return length % chunk == 0 and columns <= 2 * chunk


def gradient_parts(width: int) -> int:
    """In how many programs a chunk's gradients of q and k are found: registers hold those of 128 columns."""
    return 1 if width <= 128 else 2


def candidates(problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
    """Plans, the fastest first.

    values: chunk; columns, the block of V's columns in a walk; its warps and stages of loads in flight; prepare_warps.
    Backward also reverse_stages; grad_columns and grad_warps of the launch for the gradients; windows, the parts of the
    sequence that it takes one after another.
    """
    return planned(problem, device, direction, Kernel(model, candidate))


def model(problem: Problem, device: Device, direction: Direction) -> KernelModel:
    """Chunks as long as anything fits; of these walks of several widths, and the widest block of gradients."""
    model, K, V, size = KernelModel(device), padded(problem["K"]), padded(problem["V"]), _size(problem)
    narrow = _is_narrow(problem, device)
    chunk = model.variable("chunk", powers_of_two(16, 64), "largest", greedy=True)
    model.add(chunk <= max(16, 2 * problem["T"] - 1), "tokens of a chunk, of a sequence")
    # 64 rows of float32 leave no registers
    model.add(chunk <= (32 if size == 4 or narrow else 64), "tokens of a chunk that registers hold")
    columns = model.variable("columns", powers_of_two(16, 128), "largest")
    model.add(columns <= min(2 * V - 1, 32 if narrow else 128), "columns, of V")
    stages = model.variable("stages", (1,) if narrow else (1, 2, 3), "largest")
    warps = model.let("warps", 4 + 4 * truth(columns > 64))
    model.add(K * columns <= STATE_REGISTERS * 32 * warps, "numbers of a state, of those in registers")
    model.block(warps, 255 - 23 * truth(columns > 64), _walk_shared(chunk, K, columns, stages, size))
    model.let("prepare_warps", 4)
    if direction == "backward":
        model.let("reverse_stages", stages)
        gradient_block(model, problem, chunk, size)
        model.let("windows", windows_of(problem, chunk, size))
    return model


def candidate(problem: Problem, device: Device, direction: Direction, values: Assignment) -> Candidate:
    prepared = prepare(problem, device, values["chunk"])
    names = ("chunk", "columns", "warps", "stages", "prepare_warps")
    if direction == "forward":
        return _walk(problem, device, values.plan("triton", *names), values, "forward").after(prepared)
    plan = values.plan("triton", *names, "reverse_stages", "grad_columns", "grad_warps", "windows")
    states = _walk(problem, device, plan, values, "states").after(prepared)
    reverse = _walk(problem, device, plan, values, "reverse")
    whole = gradients_of(problem, device, values).after(reverse.after(states))
    # the plan is the last launch's
    return replace(whole, plan=plan, blocks=reverse.blocks, shared=reverse.shared, registers=reverse.registers)


def _size(problem: Problem) -> int:
    return 4 if problem.dtype == "float32" else 2


def _is_narrow(problem: Problem, device: Device) -> bool:
    """Whether tiles have to be small: before Hopper, operands of products take registers.

    Compiled for sm_80 at K = V = 128, walks of 64 and 128 columns in chunks of 64 leave up to 9 KB of stack a thread,
    the gradients 17 KB.
    """
    return (device.capability or (0, 0)) < (9, 0) and max(problem["K"], problem["V"]) > 64


def windows_of(problem: Problem, chunk: Integer, size: int) -> Integer:
    """Parts of each sequence, so that their states' gradients stay within KEPT_BYTES, or within one chunk each."""
    if problem.varlen:
        return 1
    chunks = maximum(1, ceil_div(problem["T"], chunk))
    kept = problem["B"] * problem["H"] * chunks * problem["K"] * problem["V"] * size
    return minimum(chunks, maximum(1, ceil_div(kept, KEPT_BYTES)))


def _walk_shared(chunk: Expression, K: int, columns: Expression, stages: Expression, size: int) -> Expression:
    """Bytes of a block of delta_rule_triton_dstates, which takes most; a bound of what Triton 3.6 allots at 16 bits."""
    tiles = size * chunk * (2 * K + columns + chunk) + 512
    return stages * tiles + size * chunk * (columns + 3 * chunk)


def prepare(problem: Problem, device: Device, chunk: int) -> Candidate:
    size, pairs, K = _size(problem), problem["B"] * problem["H"], padded(problem["K"])
    grid = Grid(pairs * max(1, -(-problem["T"] // chunk)), 128, 192, size * chunk * (K + 2 * chunk))
    moved = int(pairs * problem["T"] * (size * (problem["K"] * problem["Hq"] / problem["H"] + chunk) + 8))
    products = 3 * (chunk.bit_length() - 2)
    operations = 2 * grid.blocks * chunk * chunk * (K + products * chunk)
    return Candidate.of(Plan("triton"), device, grid, moved, operations, serial=PREPARE_SECONDS)


def _walk(problem: Problem, device: Device, plan: Plan, values: Assignment, name: str) -> Candidate:
    """One launch through the sequence: "forward", "states" or "reverse"."""
    size, chunk, columns, warps = _size(problem), values["chunk"], values["columns"], values["warps"]
    pairs, K, V = problem["B"] * problem["H"], problem["K"], problem["V"]
    chunks, splits = max(1, -(-problem["T"] // chunk)), -(-V // columns)
    grid = values.grid(pairs * splits)
    # q and k of a group of heads, and of the splits of a head, are read at the same time: once from memory
    share = problem["Hq"] / problem["H"]
    widths = {"forward": 2 * K * share + 2 * V, "states": K * share + V, "reverse": 2 * K * share + V}[name] + chunk
    kept = 0 if name == "forward" else pairs * chunks * K * V * size
    moved = int(pairs * problem["T"] * (size * widths + 8)) + kept + 4 * pairs * K * V
    by_key = {"forward": 3, "states": 2, "reverse": 3}[name]
    by_chunk = {"forward": 3, "states": 2, "reverse": 3}[name]
    scores = 0 if name == "states" else padded(K) * chunk
    operations = 2 * chunk * (columns * (by_key * padded(K) + by_chunk * chunk) + scores)
    working = min(warps, max(1, columns // 16))
    serial = STAGE_FACTORS[values["stages"]] * chunks * (CHUNK_SECONDS[name] + operations / (working * WARP_RATE))
    return Candidate.of(plan, device, grid, moved, grid.blocks * chunks * operations, serial=serial)


def gradient_block(model: KernelModel, problem: Problem, chunk: Integer, size: int) -> None:
    """Declares the widest block of the launch for the gradients."""
    K, V, narrow = padded(problem["K"]), padded(problem["V"]), _is_narrow(problem, model.device)
    parts = gradient_parts(problem["K"])
    columns = model.variable("grad_columns", powers_of_two(16, 128), "largest", greedy=True)
    model.add(columns <= min(2 * V - 1, 32 if parts > 1 else 64 if narrow else 128), "columns of gradients, of V")
    shared = size * (2 * columns * K + 2 * chunk * K + 3 * chunk * columns + 2 * chunk * chunk)
    if parts > 1:
        # own rows of both states beside the whole
        shared += size * columns * K
    if not narrow:
        # a gradient changes hands between warps, in float32, beside all of that
        exchanged = size * chunk * columns + 4 * chunk * maximum(K, V) + 512
        shared += truth(as_expression(chunk) < 64) * exchanged
    warps = model.let("grad_warps", 4 if narrow else 4 + 4 * truth(maximum(K, columns) > 64))
    model.block(warps, 255, shared, "gradients")


def gradients_of(problem: Problem, device: Device, values: Assignment) -> Candidate:
    """The launches for the gradients."""
    K, V, pairs, chunk, size = (
        padded(problem["K"]),
        padded(problem["V"]),
        problem["B"] * problem["H"],
        values["chunk"],
        _size(problem),
    )
    parts = gradient_parts(problem["K"])
    grid = values.grid(parts * pairs * max(1, -(-problem["T"] // chunk)), "gradients")
    plan = values.plan("triton", "grad_columns", "grad_warps")
    share = problem["Hq"] / problem["H"]
    widths = 2 * problem["K"] * (1 + share) + 3 * problem["V"] + chunk
    states = 2 * problem["K"] * problem["V"] * size
    moved = int(pairs * problem["T"] * (size * widths + 16)) + grid.blocks * states
    operations = 2 * grid.blocks * chunk * ((2 + 3 / parts) * K * V + chunk * (6 * K + 5 * V))
    whole = Candidate.of(plan, device, grid, moved, int(operations), serial=GRADIENT_SECONDS)
    # each window is two launches more
    launch = Candidate.of(plan, device, Grid(1, 32), 0, 0)
    for _ in range(2 * (values["windows"] - 1)):
        whole = whole.after(launch)
    return replace(whole, blocks=grid.blocks, shared=grid.shared, registers=grid.registers)
