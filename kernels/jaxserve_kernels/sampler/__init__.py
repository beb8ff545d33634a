"""Choosing the next token of each row, and its logprobs."""

from jaxserve_kernels.sampler.adjust import BIASED as BIASED
from jaxserve_kernels.sampler.adjust import IN_PROMPT as IN_PROMPT
from jaxserve_kernels.sampler.adjust import MASKED as MASKED
from jaxserve_kernels.sampler.adjust import MAX_BIASES as MAX_BIASES
from jaxserve_kernels.sampler.adjust import MAX_COUNT as MAX_COUNT
from jaxserve_kernels.sampler.adjust import PENALISED as PENALISED
from jaxserve_kernels.sampler.adjust import SUPPRESSED as SUPPRESSED
from jaxserve_kernels.sampler.adjust import RowAdjustments as RowAdjustments
from jaxserve_kernels.sampler.adjust import SlotTables as SlotTables
from jaxserve_kernels.sampler.api import sample as sample
from jaxserve_kernels.sampler.api import score as score
from jaxserve_kernels.sampler.reference import Logprobs as Logprobs
from jaxserve_kernels.sampler.reference import RowSampling as RowSampling
from jaxserve_kernels.sampler.reference import Sample as Sample
from jaxserve_kernels.sampler.reference import TokenScores as TokenScores
