"""What experts give, and the expert that every token has, as one sum."""

from jaxserve_kernels.shared_expert.api import add_shared_expert as add_shared_expert
