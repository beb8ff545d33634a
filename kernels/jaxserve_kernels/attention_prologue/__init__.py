"""What some models do between the projection of attention and its kernels: gates of heads, RoPE of
a part of each head, norms with weights in float32; and the gating of attention's result."""

from jaxserve_kernels.attention_prologue.api import attention_prologue as attention_prologue
from jaxserve_kernels.attention_prologue.api import gate_heads as gate_heads
from jaxserve_kernels.attention_prologue.reference import PrologueHeads as PrologueHeads
