"""Products of a step's tokens with unquantised weights."""

from jaxserve_kernels.dense_matmul.api import add_linear as add_linear
from jaxserve_kernels.dense_matmul.api import gated_linear as gated_linear
from jaxserve_kernels.dense_matmul.api import linear as linear
from jaxserve_kernels.dense_matmul.reference import gated as gated
from jaxserve_kernels.dense_matmul.reference import sum_parts as sum_parts
