"""Kernels launched one after another by one call, each started before its predecessor ends."""

from jaxserve_kernels.chain.api import FOR_HOPPER as FOR_HOPPER
from jaxserve_kernels.chain.api import call as call
from jaxserve_kernels.chain.api import why_impossible as why_impossible
from jaxserve_kernels.chain.handler import register as register
