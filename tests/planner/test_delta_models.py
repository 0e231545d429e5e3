"""Where the delta rules' models draw the line between plans."""

from holdfast.planner import Device, Problem
from holdfast.planner.kernel_model import KernelModel
from holdfast.planner.models.matrix.delta_rule.triton import gradient_block, states_fit_gradients
from holdfast.planner.models.matrix.segments import cut_in_segments


def test_states_take_the_place_of_gradients_only_where_they_fit():
    """A state of K x V in two bytes lies in a chunk's 64 tokens of K columns, q's and k's: for V up to 128."""
    assert states_fit_gradients(128, 128, 64)
    assert not states_fit_gradients(128, 129, 64)
    assert not states_fit_gradients(127, 64, 64)


def test_a_sequence_is_cut_in_halves_down_to_a_chunk_as_long_as_blocks_are_too_few():
    h200 = Device.named("h200")

    def segment_chunks(T, B=1):
        model = KernelModel(h200)
        _, chunks = cut_in_segments(model, Problem("delta_rule", "matrix", "bfloat16", (("B", B), ("T", T), ("H", 1))))
        model.let("chunks", chunks)
        return [each["chunks"] for each in model.assignments()]

    assert segment_chunks(4 * 64) == [4, 2, 1]
    assert segment_chunks(5 * 64 - 1) == [5, 3, 2]
    assert segment_chunks(64) == segment_chunks(0) == [1]
    # 132 SMs
    assert segment_chunks(16 * 64, B=66) == [16, 8]
    assert segment_chunks(16 * 64, B=65) == [16, 8, 4]
    assert segment_chunks(16 * 64, B=132) == [16]


def test_gradients_take_the_widest_block_that_fits():
    """In float32 and chunks of 32: at K = 128 the tiles alone, at 256, in two programs, own rows of a state beside."""

    def columns_and_bytes(name, width):
        sizes = (("B", 2), ("T", 256), ("H", 4), ("Hq", 4), ("K", width), ("V", width))
        model = KernelModel(Device.named(name))
        gradient_block(model, Problem("delta_rule", "matrix", "float32", sizes), 32, 4)
        (found,) = model.assignments()
        return found["grad_columns"], found["shared of gradients"]

    # of blocks of 99 KiB
    assert columns_and_bytes("rtx3090", 128) == (32, 84 * 1024)
    # beside that, what changes hands between warps
    assert columns_and_bytes("h200", 128) == (64, 152.5 * 1024)
    # of blocks of 163 KiB, of which twice as many columns with one state's own rows would take 180
    assert columns_and_bytes("a100", 256) == (16, 126 * 1024)
