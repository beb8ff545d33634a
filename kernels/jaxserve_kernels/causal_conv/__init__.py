"""Depthwise causal convolution along a sequence. Its state is the last inputs of earlier steps."""

from jaxserve_kernels.causal_conv.api import causal_conv as causal_conv
from jaxserve_kernels.causal_conv.api import convolve as convolve
from jaxserve_kernels.causal_conv.api import keep_inputs as keep_inputs
from jaxserve_kernels.causal_conv.gates import conv_and_gates as conv_and_gates
from jaxserve_kernels.causal_conv.gates_config import Operands as Operands
