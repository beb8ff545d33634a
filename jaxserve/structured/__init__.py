"""Structured output: from a request's constraint to the masks of its sequences' next tokens."""

from jaxserve.structured.bad_words import BadWords as BadWords
from jaxserve.structured.errors import GrammarError as GrammarError
from jaxserve.structured.errors import GrammarsBusy as GrammarsBusy
from jaxserve.structured.guides import Guide as Guide
from jaxserve.structured.guides import Guides as Guides
from jaxserve.structured.guides import Thinking as Thinking
from jaxserve.structured.thinking_budget import ThinkingBudget as ThinkingBudget
