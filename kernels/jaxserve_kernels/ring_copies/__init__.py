"""Copies of pages between a cache and a ring, which has all layers of a page together."""

from jaxserve_kernels.ring_copies.api import from_ring as from_ring
from jaxserve_kernels.ring_copies.api import to_ring as to_ring
