"""What `ptx.overwritten` finds in machine code."""

from __future__ import annotations

from tests.aot.ptx import overwritten

PRODUCT = "/*0000*/ QGMMA.64x64x32.F32.E4M3.E4M3 R24, R92, gdesc[UR20], R24, gsb0 ;"
"""It reads R92 to R95, and adds to R24 to R55."""
WAIT = "/*0100*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;"


def code(*instructions: str) -> str:
    return "\n".join(f"/*0000*/ {each} ;" for each in instructions)


def test_operands_and_sums_of_a_running_product() -> None:
    written = ["LDS.128 R88, [R2]", "LDS.64 R94, [R2]", "@!P0 FMUL R55, R56, R57"]
    assert overwritten(PRODUCT + code(*written) + WAIT) == [
        "LDS.64 R94, [R2]",
        "FMUL R55, R56, R57",
    ]


def test_other_registers_stores_and_what_follows_the_wait() -> None:
    others = ["LDS.128 R96, [R2]", "STS.64 [R92], R4", "ISETP.GE.AND P0, PT, R24, R25, PT"]
    assert not overwritten(PRODUCT + code(*others) + WAIT + code("FMUL R24, R24, R3"))


def test_a_product_that_reads_shared_memory_only() -> None:
    product = code("HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0")
    assert overwritten(product + code("MOV R87, R1", "MOV R88, R1")) == ["MOV R87, R1"]


def test_a_product_that_runs_on_into_the_next_turn_of_a_loop() -> None:
    turn = code("LDS.128 R92, [R2]") + PRODUCT
    loop = f".L_x_1:\n{turn}{{}}{code('@P0 BRA `(.L_x_1)')}"
    assert overwritten(loop.format("")) == ["LDS.128 R92, [R2]"]
    assert not overwritten(loop.format(WAIT))


def test_a_wait_for_all_but_the_last_group_of_products() -> None:
    wait = code("WARPGROUP.DEPBAR.LE gsb0, 0x1")
    newer = code("QGMMA.64x64x32.F32.E4M3.E4M3 R56, R96, gdesc[UR20], R56, gsb0")
    written = code("MOV R24, R1", "MOV R56, R1")
    assert overwritten(PRODUCT + newer + wait + written) == ["MOV R56, R1"]
