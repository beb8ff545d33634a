"""Programmatic dependent launch (PDL): one call launches a chain of kernels, each of which may
start before its predecessor ends."""

from jaxserve_kernels.pdl.api import FOR_HOPPER as FOR_HOPPER
from jaxserve_kernels.pdl.api import call as call
from jaxserve_kernels.pdl.api import join as join
from jaxserve_kernels.pdl.api import why_impossible as why_impossible
from jaxserve_kernels.pdl.handler import register as register
