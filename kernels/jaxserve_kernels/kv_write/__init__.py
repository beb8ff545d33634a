"""Writing new keys and values into the pages of a KV cache."""

from jaxserve_kernels.kv_write.reference import kv_write as kv_write
