"""Causal convolution along a sequence, each channel by itself, with the inputs before the step."""

from jaxserve_kernels.causal_conv.api import causal_conv as causal_conv
