"""Attention of models with gated heads, RoPE on a part of each head or float32 norm weights."""

from jaxserve_kernels.gated_attention.api import attention_prologue as attention_prologue
from jaxserve_kernels.gated_attention.api import gate_heads as gate_heads
from jaxserve_kernels.gated_attention.api import gated_attention as gated_attention
from jaxserve_kernels.gated_attention.api import no_rotation as no_rotation
from jaxserve_kernels.gated_attention.reference import PrologueHeads as PrologueHeads
