"""Adds the result of the shared expert, which every token uses, to that of the routed experts."""

from jaxserve_kernels.shared_expert.api import add_shared_expert as add_shared_expert
