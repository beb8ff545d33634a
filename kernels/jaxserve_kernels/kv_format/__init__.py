"""Formats of the KV cache: memory layout, attention and page copies of each."""

from jaxserve_kernels.kv_format.api import KV as KV
from jaxserve_kernels.kv_format.api import attend as attend
from jaxserve_kernels.kv_format.api import end_step as end_step
from jaxserve_kernels.kv_format.api import page_size as page_size
from jaxserve_kernels.kv_format.base import AttentionStep as AttentionStep
from jaxserve_kernels.kv_format.base import CacheArrays as CacheArrays
from jaxserve_kernels.kv_format.base import CacheShape as CacheShape
from jaxserve_kernels.kv_format.dense import Dense as Dense
from jaxserve_kernels.kv_format.format import KVFormat as KVFormat
from jaxserve_kernels.kv_format.format import format_of as format_of
from jaxserve_kernels.kv_format.names import AUTO as AUTO
from jaxserve_kernels.kv_format.names import NAMES as NAMES
from jaxserve_kernels.kv_format.names import named as named
from jaxserve_kernels.kv_format.pages import PageLayout as PageLayout
