"""Mixtures of experts: the router's choice, and the products of each token with its experts."""

from jaxserve_kernels.experts.api import experts as experts
from jaxserve_kernels.experts.api import route as route
from jaxserve_kernels.experts.config import token_format as token_format
from jaxserve_kernels.experts.routed import norm_and_score as norm_and_score
from jaxserve_kernels.experts.routed import routed_experts as routed_experts
from jaxserve_kernels.experts.types import ExpertActivation as ExpertActivation
from jaxserve_kernels.experts.types import ExpertWeights as ExpertWeights
from jaxserve_kernels.experts.types import Order as Order
from jaxserve_kernels.experts.types import Routes as Routes
from jaxserve_kernels.experts.types import Routing as Routing
