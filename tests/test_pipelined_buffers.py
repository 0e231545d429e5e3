"""A product that may still run when copies reach its operands is found; one that is waited for is not."""

from pipelined_buffers import raced

LOOP = """
    %k_1 = ttg.local_alloc : () -> !ttg.memdesc<{buffers}x64x128xbf16, #shared, #smem, mutable>
    %k_2 = ttg.memdesc_index %k_1[%c0_i32] : !ttg.memdesc<2x64x128xbf16> -> !ttg.memdesc<64x128xbf16>
    %k_3 = ttg.async_copy_global_to_local %a, %k_2 mask %m other %c : tensor<64x128x!tt.ptr<bf16>> -> <64x128xbf16>
    %k_4 = ttg.memdesc_index %k_1[%c1_i32] : !ttg.memdesc<2x64x128xbf16> -> !ttg.memdesc<64x128xbf16>
    %k_5 = ttg.async_copy_global_to_local %a, %k_4 mask %m other %c : tensor<64x128x!tt.ptr<bf16>> -> <64x128xbf16>
    %all:2 = scf.for %i = %c0_i32 to %count step %c1_i32 iter_args(%s_0 = %s, %at = %c0_i32) -> (tensor<128x128xf32>) {{
      %k_6 = ttg.memdesc_index %k_1[%at] : !ttg.memdesc<2x64x128xbf16> -> !ttg.memdesc<64x128xbf16>
      %s_1 = ttng.warp_group_dot %w, %k_6, %s_0 {{inputPrecision = 1 : i32, isAsync = true}} : tensor<128x64xbf16>
      {wait}
      %k_7 = ttg.memdesc_index %k_1[%next] : !ttg.memdesc<2x64x128xbf16> -> !ttg.memdesc<64x128xbf16>
      %k_8 = ttg.async_copy_global_to_local %a, %k_7 mask %m other %c : tensor<64x128x!tt.ptr<bf16>> -> <64x128xbf16>
      scf.yield %s_1, %next : tensor<128x128xf32>, i32
    }}
"""
WAIT = "%s_2 = ttng.warp_group_dot_wait %s_1 {pendings = 0 : i32} : tensor<128x128xf32>"


def test_copies_into_a_running_products_operand_are_found():
    assert raced(LOOP.format(buffers=2, wait="")) == ["%s_1 reads %k_1"]
    assert raced(LOOP.format(buffers=3, wait="")) == []
    assert raced(LOOP.format(buffers=2, wait=WAIT)) == []
