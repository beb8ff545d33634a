"""Choosing the next token of each row, and its logprobs."""

from jaxserve_kernels.sampler.api import sample as sample
from jaxserve_kernels.sampler.reference import Logprobs as Logprobs
from jaxserve_kernels.sampler.reference import RowSampling as RowSampling
