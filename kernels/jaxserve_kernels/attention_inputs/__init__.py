"""Makes attention's inputs from the QKV projection: bias, QK-norm, RoPE and KV write."""

from jaxserve_kernels.attention_inputs.api import attention_inputs as attention_inputs
from jaxserve_kernels.attention_inputs.reference import HeadWeights as HeadWeights
from jaxserve_kernels.attention_inputs.reference import KVSlots as KVSlots
from jaxserve_kernels.attention_inputs.reference import rope as rope
