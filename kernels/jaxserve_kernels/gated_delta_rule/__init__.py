"""The gated delta rule: linear attention with a decaying state that each token corrects."""

from jaxserve_kernels.gated_delta_rule.api import advance_state as advance_state
from jaxserve_kernels.gated_delta_rule.api import gated_delta_rule as gated_delta_rule
from jaxserve_kernels.gated_delta_rule.api import rule_outputs as rule_outputs
from jaxserve_kernels.gated_delta_rule.reference import Heads as Heads
from jaxserve_kernels.gated_delta_rule.reference import RuleConfig as RuleConfig
from jaxserve_kernels.gated_delta_rule.reference import RuleTokens as RuleTokens
from jaxserve_kernels.gated_delta_rule.reference import RuleWeights as RuleWeights
