"""Copies of pages between a KV cache and a ring buffer, which stores all layers of a page
together, and from one place of an array to another."""

from jaxserve_kernels.ring_copies.api import from_ring as from_ring
from jaxserve_kernels.ring_copies.api import to_ring as to_ring
from jaxserve_kernels.ring_copies.api import within as within
