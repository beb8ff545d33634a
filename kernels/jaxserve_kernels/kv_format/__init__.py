"""How keys and values lie in memory: formats of the KV cache, and attention over each."""

from jaxserve_kernels.kv_format.api import KV as KV
from jaxserve_kernels.kv_format.api import attend as attend
from jaxserve_kernels.kv_format.api import end_step as end_step
from jaxserve_kernels.kv_format.api import expanded_tokens as expanded_tokens
from jaxserve_kernels.kv_format.api import has_scales as has_scales
from jaxserve_kernels.kv_format.api import largest_magnitudes as largest_magnitudes
from jaxserve_kernels.kv_format.api import max_chunk_context as max_chunk_context
from jaxserve_kernels.kv_format.api import own_tokens as own_tokens
from jaxserve_kernels.kv_format.api import page_size as page_size
from jaxserve_kernels.kv_format.api import with_scales as with_scales
from jaxserve_kernels.kv_format.base import AttentionStep as AttentionStep
from jaxserve_kernels.kv_format.base import CacheShape as CacheShape
from jaxserve_kernels.kv_format.base import KVFormat as KVFormat
from jaxserve_kernels.kv_format.base import fixed_bytes as fixed_bytes
from jaxserve_kernels.kv_format.base import page_bytes as page_bytes
from jaxserve_kernels.kv_format.dense import Dense as Dense
from jaxserve_kernels.kv_format.names import AUTO as AUTO
from jaxserve_kernels.kv_format.names import NAMES as NAMES
from jaxserve_kernels.kv_format.names import named as named
