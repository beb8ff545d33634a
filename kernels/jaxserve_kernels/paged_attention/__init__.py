"""Attention of query tiles over a paged KV cache."""

from jaxserve_kernels.paged_attention.api import paged_attention as paged_attention
from jaxserve_kernels.paged_attention.reference import QueryTiles as QueryTiles
