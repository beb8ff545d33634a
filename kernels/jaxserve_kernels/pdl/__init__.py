"""Programmatic dependent launch (PDL): kernels launched by one call, each started before its
predecessor ends."""

from jaxserve_kernels.pdl.api import FOR_HOPPER as FOR_HOPPER
from jaxserve_kernels.pdl.api import call as call
from jaxserve_kernels.pdl.api import why_impossible as why_impossible
from jaxserve_kernels.pdl.handler import register as register
