"""KVarN (arXiv 2606.03458): keys in 4 bits and values in 4 or 2, normalised over whole tiles."""

from jaxserve_kernels.kv_format.kvarn.format import KVarN as KVarN
from jaxserve_kernels.kv_format.kvarn.layout import KVarNKV as KVarNKV
