"""Structured output: from what a request asks for to the tokens that its sequence may have next."""

from jaxserve.structured.bad_words import BadWords as BadWords
from jaxserve.structured.guides import Guides as Guides
from jaxserve.structured.guides import Thinking as Thinking
from jaxserve.structured.thinking_budget import ThinkingBudget as ThinkingBudget
from jaxserve.structured.worker import GrammarError as GrammarError
