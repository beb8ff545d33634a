"""Products of a step's tokens with quantised weights."""

from jaxserve_kernels.quantized_matmul.api import gated_linear as gated_linear
from jaxserve_kernels.quantized_matmul.api import linear as linear
from jaxserve_kernels.quantized_matmul.api import take_inputs as take_inputs
from jaxserve_kernels.quantized_matmul.api import token_format as token_format
