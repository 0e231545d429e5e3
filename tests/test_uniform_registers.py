"""What ptxas made of a kernel that failed on a GPU is found; what is right is not."""

from uniform_registers import misread_stack_in, overwritten_in, spilled_in, unset_in

PROLOGUE = """
        /*0010*/                   UIADD3 UR10, UR4, 0x10000, URZ ;
        /*0020*/                   USHF.R.U32.HI UR42, URZ, 0x4, UR10 ;
        /*0030*/              @!UP1 UIADD3 UR46, UP0, {}, 0x20, URZ ;
        /*0040*/                   UMOV UR43, 0xc0000010 ;
        /*0050*/                   UIMAD.WIDE.U32 UR44, UR42, UR10, URZ ;
        /*0060*/                   UMOV UR47, UR45 ;
        /*0070*/                   HGMMA.64x16x16.F32.BF16 R56, gdesc[UR44].tnspB, RZ, !UPT, gsb0 ;
        /*0080*/                   HGMMA.64x64x16.F32.BF16 R24, R148, gdesc[UR44], R24, gsb0 ;
        /*0090*/                   LDG.E R2, desc[UR42][R2.64] ;
"""


def test_a_descriptor_that_is_never_set_is_found():
    good = "R2UR UR4, R1 ;\n" + PROLOGUE
    assert list(unset_in(good.format("UR42"))) == []
    assert list(unset_in(good.format("UR46"))) == ["@!UP1 UIADD3 UR46, UP0, UR46, 0x20, URZ"]


def test_a_product_reads_two_descriptors_of_memory_and_one_beside_registers():
    product = "UMOV UR10, 0x1 ;\nUMOV UR11, 0x1 ;\nHGMMA.64x64x16.F32.BF16 R24, {}, R24, gsb0 ;"
    assert list(unset_in(product.format("R148, gdesc[UR8]"))) == []
    assert len(list(unset_in(product.format("gdesc[UR8].tnspA.tnspB")))) == 1


IN_FLIGHT = """
        HGMMA.64x128x16.F32.BF16 R24, R88, gdesc[UR16].tnspB, R24 ;
        HGMMA.64x128x16.F32.BF16 R24, R92, gdesc[UR16].tnspB, R24, gsb0 ;
        HGMMA.64x64x16.F32.BF16 R104, R96, gdesc[UR16].tnspB, R104, gsb0 ;
        {}
        WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        {}
        WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        {}
"""


def test_an_operand_that_is_written_while_its_product_runs_is_found():
    nothing, load, wide = "NOP", "LDSM.16.MT88.4 R92, [R10+0x800]", "LDS.64 R98, [R92+0x18060]"
    assert list(overwritten_in(IN_FLIGHT.format(load, nothing, nothing))) == [load]
    assert list(overwritten_in(IN_FLIGHT.format(nothing, load, load))) == []
    assert list(overwritten_in(IN_FLIGHT.format(nothing, wide, wide))) == [wide]
    # a store reads, and so does what has it as another operand
    assert list(overwritten_in(IN_FLIGHT.format("STS.64 [R92], R88", "FMUL R100, R96, R97", nothing))) == []


def test_a_register_that_is_spilled_in_a_loop_of_products_is_found():
    loop = """
        STL [R1], R8 ;
.L_x_1:
        HGMMA.64x128x16.F32.BF16 R24, R88, gdesc[UR16].tnspB, R24, gsb0 ;
        {}
   @!P0 BRA `(.L_x_1) ;
.L_x_2:
        LDL R8, [R1] ;
   @!P0 BRA `(.L_x_2) ;
"""
    assert list(spilled_in(loop.format("NOP"))) == []
    assert list(spilled_in(loop.format("LDL R8, [R1] ;"))) == ["LDL R8, [R1] ;"]


def test_a_stack_pointer_in_a_descriptors_place_is_found():
    right = """
        LDC R1, c[0x0][0x28] ;
        VIADD R1, R1, 0xfffffd50 ;
        STL.64 [R1+0x188], R2 ;
        LDL.LU R0, [R1+0x188] ;
        IADD3 R10, P1, R11, 0x2, RZ ;
"""
    assert list(misread_stack_in(right)) == []
    wrong = [
        "IADD3 R2, P1, R1, 0x2, RZ",
        "IADD3.X R5, R1, -0x7fffffe0, RZ, P1, !PT",
        "IMAD.MOV.U32 R5, RZ, RZ, R1.reuse",
    ]
    assert list(misread_stack_in(right + " ;\n".join(wrong))) == wrong
