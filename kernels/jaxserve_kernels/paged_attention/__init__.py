"""Attention of query tiles over a paged KV cache."""

from jaxserve_kernels.paged_attention.reference import QueryTiles as QueryTiles
from jaxserve_kernels.paged_attention.reference import paged_attention as paged_attention
