"""Sums over the programs of a thread block cluster, which exchange numbers through shared memory.

A kernel with a constant CLUSTER is launched by PDL in clusters of so many programs along the grid's
first axis. Instructions are described in NVIDIA's "Parallel Thread Execution ISA".
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def begin_cluster():
    """Prepares one `sum_of_cluster`: returns the address of its shared memory, which has room for
    eight numbers and a barrier. Tells the other programs that this one runs."""
    return tl.inline_asm_elementwise(
        """{ .reg .b32 thread, bytes; .reg .pred first;
        .shared .align 16 .b8 space[48];
        mov.u32 $0, space; mov.u32 thread, %tid.x; setp.eq.u32 first, thread, 0;
        mov.u32 bytes, %cluster_nctarank; shl.b32 bytes, bytes, 2;
        @first mbarrier.init.shared::cta.b64 [space+32], 1;
        @first fence.mbarrier_init.release.cluster;
        @first mbarrier.arrive.expect_tx.shared::cta.b64 _, [space+32], bytes;
        barrier.cluster.arrive.relaxed.aligned; }""",
        "=r", [], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def sum_of_cluster(x, space):
    """The sum of a float32 scalar over the at most eight programs of the cluster. Each stores its
    number in the memory of all, whose barriers count the bytes. `space`: see `begin_cluster`."""
    return tl.inline_asm_elementwise(
        """{ .reg .b32 there, barrier, rank, count, thread; .reg .pred p; .reg .f32 y;
        barrier.cluster.wait.acquire.aligned;
        mov.u32 thread, %tid.x; mov.u32 rank, %cluster_ctarank; mov.u32 count, %cluster_nctarank;
        setp.lt.u32 p, thread, count;
        mad.lo.u32 there, rank, 4, $2; mapa.shared::cluster.u32 there, there, thread;
        add.u32 barrier, $2, 32; mapa.shared::cluster.u32 barrier, barrier, thread;
        @p st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [there], $1, [barrier];
        WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [$2+32], 0; @!p bra WAIT;
        ld.shared.f32 $0, [$2];
        setp.gt.u32 p, count, 1; @p ld.shared.f32 y, [$2+4]; @p add.f32 $0, $0, y;
        setp.gt.u32 p, count, 2; @p ld.shared.f32 y, [$2+8]; @p add.f32 $0, $0, y;
        setp.gt.u32 p, count, 3; @p ld.shared.f32 y, [$2+12]; @p add.f32 $0, $0, y;
        setp.gt.u32 p, count, 4; @p ld.shared.f32 y, [$2+16]; @p add.f32 $0, $0, y;
        setp.gt.u32 p, count, 5; @p ld.shared.f32 y, [$2+20]; @p add.f32 $0, $0, y;
        setp.gt.u32 p, count, 6; @p ld.shared.f32 y, [$2+24]; @p add.f32 $0, $0, y;
        setp.gt.u32 p, count, 7; @p ld.shared.f32 y, [$2+28]; @p add.f32 $0, $0, y; }""",
        "=&f,f,r", [x, space], dtype=tl.float32, is_pure=False, pack=1,
    )  # fmt: skip
