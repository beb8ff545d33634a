"""Attention of query tiles over a paged KV cache."""

from jaxserve_kernels.paged_attention.api import attend_pages as attend_pages
from jaxserve_kernels.paged_attention.api import paged_attention as paged_attention
from jaxserve_kernels.paged_attention.config import tile_tokens as tile_tokens
from jaxserve_kernels.paged_attention.reference import QueryTiles as QueryTiles
