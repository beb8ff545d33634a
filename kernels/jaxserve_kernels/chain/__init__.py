"""Kernels launched one after another by one call, each started before its predecessor ends."""

from jaxserve_kernels.chain.api import call as call
from jaxserve_kernels.chain.handler import register as register
