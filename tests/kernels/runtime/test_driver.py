"""Launches through the driver: which kernels it takes, and what the driver is given."""

import ctypes
import struct
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from holdfast.kernels.runtime import driver as direct_launch

PTX = """
.visible .entry copy(
	.param .align 64 .b8 copy_param_0[128],
	.param .u32 copy_param_1,
	.param .u32 copy_param_2,
	.param .u64 copy_param_3,
	.param .u64 copy_param_4,
	.param .u64 .ptr .global .align 1 copy_param_5,
	.param .u32 copy_param_6,
	.param .u64 copy_param_7,
	.param .f32 copy_param_8,
	.param .u64 .ptr .global .align 1 copy_param_9,
	.param .u64 .ptr .global .align 1 copy_param_10
)
.reqntid 96
{
"""
DESCRIPTOR = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [4, 8], "fp4_padded": False}


class Compiled(SimpleNamespace):
    """In place of a compiled kernel of a descriptor, None, a pointer, three numbers and a constant."""

    def __getitem__(self, grid):
        return lambda *arguments: self.launched.append((grid, *arguments))


def compiled(**changes):
    plain = {
        "num_ctas": 1, "shared": 1234, "launch_pdl": False, "launch_cooperative_grid": False, "global_scratch_size": 0,
        "profile_scratch_size": 0, "tensordesc_meta": [DESCRIPTOR],
    }  # fmt: skip
    kinds = {
        "d": "tensordesc<bf16[4, 8]>", "none": "constexpr", "x": "*fp32", "n": "i32", "m": "i64", "f": "fp32",
        "SIZE": "constexpr",
    }  # fmt: skip
    asm, source = {"ptx": changes.pop("ptx", PTX)}, SimpleNamespace(signature=changes.pop("signature", kinds))
    metadata = SimpleNamespace(**plain | changes)
    return Compiled(name="copy", kernel=b"code", metadata=metadata, asm=asm, src=source, launched=[])


class Driver:
    """In place of libcuda: keeps what it was given. statuses: what its launches return."""

    def __init__(self, *statuses):
        self.statuses, self.launches, self.maps, self.entered = list(statuses), [], [], []
        self.attributes = []

    def cuLaunchKernel(self, function, *rest):
        *dimensions, shared, stream, addresses, extra = rest
        sizes = (128, 4, 4, 8, 8, 8, 4, 8, 4, 8, 8)
        parameters = [ctypes.string_at(address, size) for address, size in zip(addresses, sizes, strict=True)]
        assert addresses[0] % 64 == 0
        assert extra is None
        self.launches.append((function, dimensions, shared, stream, parameters))
        return self.statuses.pop(0) if self.statuses else 0

    def cuLaunchKernelEx(self, config, function, addresses, extra):
        *dimensions, shared, stream, attributes, count = struct.unpack("7I4xQQI4x", ctypes.string_at(config, 56))
        self.attributes.append([struct.unpack("I4xi", ctypes.string_at(attributes + 72 * n, 12)) for n in range(count)])
        return self.cuLaunchKernel(function, *dimensions, shared, stream, addresses, extra)

    def cuTensorMapEncodeTiled(self, place, dtype, rank, address, *rest):
        shape, strides, box, steps, *modes = ([*x] if hasattr(x, "_length_") else x for x in rest)
        self.maps.append((dtype, rank, address, shape, strides, box, steps, modes))
        ctypes.memset(place, len(self.maps), 128)
        return 0

    def cuDevicePrimaryCtxRetain(self, context, device):
        self.entered.append(device)
        return 0

    def cuCtxSetCurrent(self, context):
        return 0

    def cuGetErrorString(self, status, text):
        text._obj.value = b"no such thing"
        return 0


@pytest.fixture
def driver(monkeypatch):
    found = Driver()
    monkeypatch.setattr(direct_launch, "_cuda", lambda: found)
    utils = SimpleNamespace(
        load_binary=lambda name, code, shared, device: (b"module of", 77 if code == b"code" else 0, 1),
        get_device_properties=lambda device: {"max_shared_mem": 2000},
    )
    active = SimpleNamespace(get_current_device=lambda: 3, get_current_stream=lambda device: 100 + device, utils=utils)
    monkeypatch.setattr(direct_launch, "driver", SimpleNamespace(active=active))
    return found


def tiled(x):
    return SimpleNamespace(base=x, shape=x.shape, strides=x.stride())


def test_parameters_are_packed_as_the_kernel_declares_them(driver):
    kernel = compiled()
    run = direct_launch.DriverLauncher(kernel)
    x, tiles = torch.zeros(5), torch.zeros(6, 16, dtype=torch.bfloat16)
    run((2, 3, 4), (tiled(tiles), None, x, -5, 2**40, 0.5, 64), (64,))
    ((function, dimensions, shared, stream, parameters),) = driver.launches
    assert (function, dimensions, shared, stream) == (77, [2, 3, 4, 96, 1, 1], 1234, 103)
    numbers = (6, 16, 16, 1, x.data_ptr(), -5, 2**40, 0.5, 0, 0)
    packed = [struct.pack(form, n) for form, n in zip("iiqqQiqfQQ", numbers, strict=True)]
    assert parameters == [b"\x01" * 128, *packed]
    # sizes and strides are innermost first, strides in bytes; 128-byte swizzle, no fill
    assert driver.maps == [(9, 2, tiles.data_ptr(), [16, 6], [32], [8, 4], [1, 1], [0, 3, 2, 0])]


@pytest.mark.parametrize(("option", "attribute"), [("launch_pdl", 6), ("launch_cooperative_grid", 2)])
def test_a_programmatic_dependent_or_a_cooperative_kernel_is_launched_as_one(driver, option, attribute):
    plain, other = (direct_launch.DriverLauncher(compiled(**{option: asked})) for asked in (False, True))
    arguments = tiled(torch.zeros(8, 8, dtype=torch.float16)), None, torch.zeros(5), 1, 2**40, 1.0, 64
    for run in (plain, other):
        run((2, 3, 4), arguments, (64,))
    first, second = driver.launches
    assert driver.attributes == [[(attribute, 1)]]
    assert first[:-1] == second[:-1]
    assert first[-1][1:] == second[-1][1:]
    driver.statuses[:] = [201, 0]
    other((2, 3, 4), arguments, (64,))
    assert driver.entered == [3]


def test_a_map_is_encoded_once_for_an_address_a_shape_and_strides(driver):
    run = direct_launch.DriverLauncher(compiled())
    x, tiles = torch.zeros(5), torch.zeros(8, 32, dtype=torch.float16)
    for part in (tiles, tiles, tiles[1:], tiles[:, :16], tiles[:4], tiles):
        run((1, 1, 1), (tiled(part), None, x, 1, 1, 1.0, 64), (64,))
    assert len(driver.maps) == 4
    assert [launch[-1][0][0] for launch in driver.launches] == [1, 1, 2, 3, 4, 1]


def test_a_thread_without_a_context_gets_the_devices(driver):
    run = direct_launch.DriverLauncher(compiled())
    driver.statuses[:] = [201, 0]
    run((1, 1, 1), (tiled(torch.zeros(8, 8, dtype=torch.float16)), None, torch.zeros(5), 1, 1, 1.0, 64), ())
    assert driver.entered == [3]
    assert len(driver.launches) == 2


def test_the_drivers_error_is_raised(driver):
    run = direct_launch.DriverLauncher(compiled())
    driver.statuses[:] = [700]
    with pytest.raises(RuntimeError, match="launching copy: no such thing"):
        run((1, 1, 1), (tiled(torch.zeros(8, 8, dtype=torch.float16)), None, torch.zeros(5), 1, 1, 1.0, 64), ())


def test_threads_do_not_share_a_block(driver):
    """A second launch that begins within the first has parameters of its own."""
    run = direct_launch.DriverLauncher(compiled())
    arguments = [tiled(torch.zeros(8, 8, dtype=torch.float16)), None, torch.zeros(5), 1, 1, 1.0, 64]
    launch, within = driver.cuLaunchKernel, []

    def launch_another(*given):
        if not within:
            within.append(True)
            run((1, 1, 1), [*arguments[:3], 2, *arguments[4:]], ())
        return launch(*given)

    run.cuda_launch = launch_another
    run((1, 1, 1), arguments, ())
    assert [struct.unpack("i", parameters[6])[0] for *_, parameters in driver.launches] == [2, 1]


def test_a_bound_launch_starts_again_and_again_beside_others(driver):
    run = direct_launch.DriverLauncher(compiled())
    x, y = (tiled(torch.zeros(8, 8, dtype=torch.float16)) for _ in range(2))
    maps = [next(tiles for _, tiles in run.places if tiles is not None).encoder(z)(z.base.data_ptr()) for z in (x, y)]
    numbers = [8, 8, 8, 1, 4096, 1, 2**40, 1.0]
    first, second = (run.bound((n, 1, 1), [maps[n - 1], *numbers[:-1], float(n)]) for n in (1, 2))
    driver.launches.clear()
    for start in (first, second, first):
        start()
    run((3, 1, 1), (x, None, torch.zeros(5), 1, 2**40, 3.0, 64), ())
    first()
    assert [dimensions[0] for _, dimensions, *_ in driver.launches] == [1, 2, 1, 3, 1]
    assert [struct.unpack("f", parameters[8])[0] for *_, parameters in driver.launches] == [1.0, 2.0, 1.0, 3.0, 1.0]
    assert [parameters[0][0] for *_, parameters in driver.launches] == [1, 2, 1, 3, 1]
    driver.statuses[:] = [700]
    with pytest.raises(RuntimeError, match="launching copy: no such thing"):
        second()


@pytest.mark.parametrize(
    "changes",
    [
        {"num_ctas": 2},
        {"global_scratch_size": 128},
        {"profile_scratch_size": 128},
        {"tensordesc_meta": None},
        {"tensordesc_meta": [DESCRIPTOR | {"fp4_padded": True}]},
        {"ptx": PTX.replace(".param .u32 copy_param_6,\n", "")},
        {"ptx": PTX.replace(",\n\t.param .u64 .ptr .global .align 1 copy_param_10", "")},
        {"ptx": PTX.replace(".reqntid 96", "")},
        {"signature": {"x": "*fp32", "n": "u1"}},
        {"signature": {"x": ("*fp32", "i32")}},
    ],
)  # fmt: skip
def test_what_is_laid_out_otherwise_is_left_to_triton(changes):
    assert direct_launch.has_known_parameters(compiled())
    assert not direct_launch.has_known_parameters(compiled(**changes))
    kernel = compiled(**changes)
    direct_launch.launcher(kernel)((1, 2, 3), (4, 5), (6,))
    assert kernel.launched == [((1, 2, 3), 4, 5, 6)]


@triton.jit
def _scale(x_ptr, y_ptr, none_ptr, n, wide, one, factor, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(y_ptr + at + wide, tl.load(x_ptr + at, mask=at < n) * factor + one)


@pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="another version may launch its kernels itself")
def test_what_triton_3_6_compiles_has_known_parameters():
    signature = {
        "x_ptr": "*bf16", "y_ptr": "*fp32", "none_ptr": "constexpr", "n": "i32", "wide": "i64", "one": "constexpr",
        "factor": "fp32", "SIZE": "constexpr",
    }  # fmt: skip
    source = ASTSource(_scale, signature, {(2,): None, (5,): 1, (7,): 64}, {})
    kernel = triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": 2})
    assert direct_launch.has_known_parameters(kernel)
    assert direct_launch._entry(kernel.asm["ptx"]) == (64, [8, 8, 4, 8, 4, 8, 8])


def test_a_kernel_with_more_shared_memory_than_there_is_says_so(driver):
    with pytest.raises(RuntimeError, match="copy: a block takes 2001 bytes of shared memory; this GPU has 2000"):
        direct_launch.DriverLauncher(compiled(shared=2001))


class Addressed(Driver):
    """A driver whose maps begin with their address. flag: what else tells maps apart, by their address."""

    def __init__(self, flag=lambda address: 0):
        super().__init__()
        self.flag = flag

    def cuTensorMapEncodeTiled(self, place, dtype, rank, address, *rest):
        if address % 16:
            return 1
        self.maps.append(address)
        found = address.to_bytes(8, "little") + bytes([self.flag(address)] * 120)
        ctypes.memmove(place, found, 128)
        return 0

    def cuGetErrorString(self, status, text):
        return 0


def encoder_by(driver, monkeypatch):
    monkeypatch.setattr(direct_launch, "_cuda", lambda: driver)
    x = SimpleNamespace(base=torch.empty(4, 8, dtype=torch.bfloat16), shape=[4, 8], strides=[8, 1])
    return direct_launch.TmaDescriptorCache(DESCRIPTOR).encoder(x)


def test_a_map_at_another_address_is_not_asked_of_the_driver(monkeypatch):
    driver = Addressed()
    encode = encoder_by(driver, monkeypatch)
    addresses = [4096, 4096, 2**40 + 512, 4096, 64, 2**47]
    assert [encode(address) for address in addresses] == [x.to_bytes(8, "little") + bytes(120) for x in addresses]
    # the first is told to differ from a second in its address alone
    assert driver.maps == [4096, 4096, 2**40 + 512]
    # which the driver takes none of
    with pytest.raises(RuntimeError, match="a descriptor of tiles"):
        encode(4096 + 8)


def test_maps_that_differ_in_more_than_their_address_are_the_drivers(monkeypatch):
    driver = Addressed(lambda address: address // 4096 % 2)
    encode = encoder_by(driver, monkeypatch)
    for address in (4096, 8192, 12288, 16384):
        assert encode(address)[8:] == bytes([address // 4096 % 2] * 120)
    assert len(driver.maps) == 4
