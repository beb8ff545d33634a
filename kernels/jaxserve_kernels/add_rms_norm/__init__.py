"""Residual add and RMSNorm in one pass."""

from jaxserve_kernels.add_rms_norm.api import add_rms_norm as add_rms_norm
from jaxserve_kernels.add_rms_norm.api import add_rms_norm_twice as add_rms_norm_twice
from jaxserve_kernels.add_rms_norm.reference import rms_norm as rms_norm
