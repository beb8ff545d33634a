"""The products of a part of `hopper.py`: its rows of a weight times the tokens of a tile.

8-bit codes of other types than the tokens' are converted in the registers that the tensor cores
read, those of 4 bits in `hopper_four_bits`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from jaxserve_kernels.experts.hopper_lists import BOX, DOWN
from jaxserve_kernels.quantized_matmul.triton_arguments import INT8
from jaxserve_kernels.quantized_matmul.triton_unpack import each, int8_pair

_BOX = gl.constexpr(BOX)
PLAIN = gl.constexpr(-2)
"""Stands for an unquantised weight where a `weights.Kind` is expected."""
_INT8 = gl.constexpr(INT8.value)


@gluon.jit
def shared_sums(
    part: gl.constexpr, PARTS: gl.constexpr, OWN: gl.constexpr,
    rings, scale_ptr, first, second: gl.constexpr, all_rows: gl.constexpr, at,
    k: gl.constexpr, STAGES: gl.constexpr, TOKENS: gl.constexpr, TAIL: gl.constexpr,
    GATED: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Returns the sums of a part's rows of a tile, [rows, TOKENS] and, with TAIL, [rows, _BOX],
    from step `at` of the rings on; and the step after the tile. The tensor cores read the weights
    from the rings: bfloat16, or fp8 codes with a scale per row or per 128 inputs. A step is a panel
    of tokens.

    Before the products of a group of inputs are added, sums are divided by the group's scale, so
    that one accumulator is enough.
    """
    x_ring, t_ring, w_ring, s_ring, ready, free = rings
    GATHER: gl.constexpr = GATED != DOWN
    inputs: gl.constexpr = 16 if KIND == PLAIN else 32  # of the tensor cores' products
    groups: gl.constexpr = k // GROUP
    steps: gl.constexpr = k // t_ring.shape[2]
    main, short = no_sums(PARTS, OWN, TOKENS, inputs)
    row: gl.constexpr = gl.SliceLayout(1, main.type.layout)
    before = gl.full([main.shape[0]], 1.0, gl.float32, row)
    if KIND != PLAIN and groups == 1:
        lane = gl.arange(0, main.shape[0], row)
        before = gl.load(scale_ptr + weight_rows(first, second, lane, all_rows, GATED))
    for step in range(steps):
        stage = at % STAGES
        wait(ready.index(stage), (at // STAGES) & 1, GATHER)
        if groups > 1:
            scale = divisor(s_ring.index(stage * PARTS + part).load(row))
            main, short = times(main, short, before * reciprocal(scale))
            before = scale
        x = x_ring.index(stage).slice(0, TOKENS, dim=0).permute((1, 0))
        w = _in_shared_memory(w_ring.index(stage * PARTS + part))
        main = warpgroup_mma(w, x, main, is_async=True)
        if TAIL:
            x = tail(x_ring.index(stage), t_ring.index(stage), TOKENS).permute((1, 0))
            short = warpgroup_mma(w, x, short, is_async=True)
        # Sums that are not divided wait for the products of the previous step only.
        behind: gl.constexpr = 0 if groups > 1 else 2 if TAIL else 1
        main, short = waited(main, short, behind, TAIL)
        if groups > 1:
            mbarrier.arrive(free.index(stage), count=1)
        else:
            mbarrier.arrive(free.index((at + STAGES - 1) % STAGES), count=1, pred=step > 0)
        at += 1
    if groups == 1:
        main, short = waited(main, short, 0, TAIL)
        mbarrier.arrive(free.index((at + STAGES - 1) % STAGES), count=1)
    if KIND != PLAIN:
        main, short = times(main, short, before)
    return main, short, at


@gluon.jit
def no_sums(
    PARTS: gl.constexpr, OWN: gl.constexpr, TOKENS: gl.constexpr, inputs: gl.constexpr
):  # fmt: skip
    """Sums of a part's rows, 0: [rows, TOKENS] and [rows, _BOX]. inputs: of the tensor cores'
    products."""
    WARPS: gl.constexpr = 8 if PARTS == 1 else 4
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TOKENS, inputs])
    short: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, _BOX, inputs])
    main = gl.zeros([OWN, TOKENS], gl.float32, layout)
    return main, gl.zeros([OWN, _BOX], gl.float32, short)


@gluon.jit
def tail(panel, last, TOKENS: gl.constexpr):
    """The box after the first TOKENS tokens of a panel; `last` after all of its tokens."""
    if panel.shape[0] == TOKENS:  # noqa: SIM108  (a constant for the compiler)
        box = last
    else:
        box = panel.slice(TOKENS, _BOX, dim=0)
    return box


@gluon.jit
def wait(bar, phase, GATHER: gl.constexpr):
    """Waits for a full stage. GATHER: its tokens were copied by threads, so the tensor cores see
    them only after a fence."""
    mbarrier.wait(bar, phase)
    if GATHER:
        fence_async_shared()


@gluon.jit
def _in_shared_memory(rows):
    """Rows of a weight as an operand in shared memory: [rows, 64] in bfloat16, [rows, 128] in
    e4m3."""
    if rows.dtype != gl.bfloat16:
        by_bytes: gl.constexpr = gl.NVMMASharedLayout(128, 8, rank=2)
        rows = rows.reinterpret(gl.float8e4nv, [rows.shape[0], 128], by_bytes)
    return rows


@gluon.jit
def tile_rows(first, second: gl.constexpr, lane, GATED: gl.constexpr):
    """Rows of an expert's weight that a part's lanes multiply. Gated, every 8 rows of gate are
    followed by the same 8 of up, so that a thread has the sums of both. first: the part's first
    row. second: the distance between gate and up."""
    if GATED == DOWN:
        row = first + lane
    else:
        row = first + lane // 8 % 2 * second + lane // 16 * 8 + lane % 8
    return row


@gluon.jit
def weight_rows(
    first, second: gl.constexpr, lane, all_rows: gl.constexpr, GATED: gl.constexpr
):  # fmt: skip
    """`tile_rows` of a weight of `all_rows`. Those past its end are of its last 64."""
    row = tile_rows(first, second, lane, GATED)
    return gl.minimum(row // 64, all_rows // 64 - 1) * 64 + row % 64


@gluon.jit
def waited(main, short, behind: gl.constexpr, TAIL: gl.constexpr):
    """The sums after all products but the last `behind` are done."""
    if TAIL:
        main, short = warpgroup_mma_wait(behind, deps=[main, short])
    else:
        main = warpgroup_mma_wait(behind, deps=[main])
    return main, short


@gluon.jit
def add_products(codes, x_ring, t_ring, stage, main, short, TAIL: gl.constexpr):
    """Adds the products of codes to the sums. They run on."""
    TOKENS: gl.constexpr = main.shape[1]
    x = x_ring.index(stage).slice(0, TOKENS, dim=0)
    main = warpgroup_mma(codes, x.permute((1, 0)), main, is_async=True)
    if TAIL:
        x = tail(x_ring.index(stage), t_ring.index(stage), TOKENS)
        again: gl.constexpr = gl.DotOperandLayout(0, short.type.layout, 4)
        codes = gl.convert_layout(codes, again, assert_trivial=True)
        short = warpgroup_mma(codes, x.permute((1, 0)), short, is_async=True)
    return main, short


@gluon.jit
def divisor(scale):
    """Scales of rows, at least so large that sums can be divided by them."""
    return gl.where(gl.abs(scale) < 1e-18, 1e-18, scale)


@gluon.jit
def reciprocal(scale):
    """1 / scale, except for the last bit. An exact division takes ten instructions."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [scale], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def code_sums(
    part: gl.constexpr, PARTS: gl.constexpr, OWN: gl.constexpr,
    rings, scale_ptr, first, second: gl.constexpr, all_rows: gl.constexpr, at,
    k: gl.constexpr, STAGES: gl.constexpr, TOKENS: gl.constexpr, TAIL: gl.constexpr,
    GATED: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, UNPACK: gl.constexpr,
):  # fmt: skip
    """`shared_sums` of 8-bit codes in bfloat16, with a scale per 128 inputs or per row. While one
    warpgroup converts codes, others multiply."""
    _, _, _, _, ready, free = rings
    SCALED: gl.constexpr = k > GROUP  # else rows have scales
    main, short = no_sums(PARTS, OWN, TOKENS, 16)
    for _ in range(k // 128):
        stage = at % STAGES
        wait(ready.index(stage), (at // STAGES) & 1, GATED != DOWN)
        tile = stage * PARTS + part
        main, short = _add_codes(rings, stage, tile, main, short, TAIL, KIND, SCALED, UNPACK)
        mbarrier.arrive(free.index(stage), count=1)
        at += 1
    if not SCALED:
        lane = gl.arange(0, main.shape[0], gl.SliceLayout(1, main.type.layout))
        scale = gl.load(scale_ptr + weight_rows(first, second, lane, all_rows, GATED))
        main, short = times(main, short, scale)
    return main, short, at


@gluon.jit
def times(main, short, rows):
    """Multiplies sums by a factor for each row."""
    again = gl.convert_layout(rows, gl.SliceLayout(1, short.type.layout), assert_trivial=True)
    return main * gl.expand_dims(rows, 1), short * gl.expand_dims(again, 1)


@gluon.jit
def _add_codes(
    rings, stage, tile, main, short,
    TAIL: gl.constexpr, KIND: gl.constexpr, SCALED: gl.constexpr, UNPACK: gl.constexpr,
):  # fmt: skip
    """Adds the products of a tile of codes, 128 inputs, to main and short."""
    TOKENS: gl.constexpr = main.shape[1]
    x_ring, t_ring, w_ring, s_ring, _, _ = rings
    operand: gl.constexpr = gl.DotOperandLayout(0, main.type.layout, 2)
    short_operand: gl.constexpr = gl.DotOperandLayout(0, short.type.layout, 2)
    row: gl.constexpr = gl.SliceLayout(1, operand)
    codes = w_ring.index(tile)
    planes = int8_pair(codes.load(operand)) if KIND == _INT8 else UNPACK(codes.load(operand))
    if SCALED:
        scale = s_ring.index(tile).load(row)
        planes = (_scaled(planes[0], scale), _scaled(planes[1], scale))
    for plane in gl.static_range(2):
        panel = stage * 2 + plane
        x = x_ring.index(panel).slice(0, TOKENS, dim=0)
        main = warpgroup_mma(planes[plane], x.permute((1, 0)), main, is_async=True)
        if TAIL:
            x = tail(x_ring.index(panel), t_ring.index(panel), TOKENS)
            again = gl.convert_layout(planes[plane], short_operand, assert_trivial=True)
            short = warpgroup_mma(again, x.permute((1, 0)), short, is_async=True)
    # The next step overwrites registers that these products read.
    if TAIL:
        main, short = warpgroup_mma_wait(0, deps=[main, short])
    else:
        main = warpgroup_mma_wait(0, deps=[main])
    return main, short


@gluon.jit
def _scaled(values, rows):
    factor = each(rows.to(gl.bfloat16), values.shape)
    return gl.inline_asm_elementwise(
        """{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero; }""",
        "=r,r,r", [values, factor], dtype=gl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip
