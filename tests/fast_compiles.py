"""XLA's flags for the fast tests, of their own process and of servers with models of theirs."""

from __future__ import annotations

FAST_COMPILES = (
    "--xla_backend_optimization_level=0 "
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters "
    "--xla_cpu_parallel_codegen_split_count=1"
)
"""Compiling is most of what the tests do, so XLA's CPU code is left as it comes, and made by the
emitters that need no MLIR: a tiny model's runner takes 4.2 s of processor time in place of 9.4. A
program is compiled whole: in parts, which other cores could take, it is about a tenth more work."""
