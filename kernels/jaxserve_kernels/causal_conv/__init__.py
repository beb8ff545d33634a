"""Causal convolution along a sequence, each channel by itself, with the inputs before the step."""

from jaxserve_kernels.causal_conv.api import causal_conv as causal_conv
from jaxserve_kernels.causal_conv.api import convolve as convolve
from jaxserve_kernels.causal_conv.api import keep_inputs as keep_inputs
