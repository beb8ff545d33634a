"""From the QKV projection to what attention reads: bias, QK-norm, RoPE, KV write."""

from jaxserve_kernels.attention_inputs.api import attention_inputs as attention_inputs
from jaxserve_kernels.attention_inputs.reference import HeadWeights as HeadWeights
from jaxserve_kernels.attention_inputs.reference import KVSlots as KVSlots
from jaxserve_kernels.attention_inputs.reference import rope as rope
