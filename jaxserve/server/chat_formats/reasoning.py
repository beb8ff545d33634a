"""Formats of reasoning: the markers around it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ReasoningFormat:
    """Reasoning between two markers at the beginning of the output."""

    name: str
    opens: str
    closes: str
    begins_open: bool = False
    """Whether outputs begin inside of reasoning, even if the prompt does not show the opening
    marker."""

    @property
    def markers(self) -> tuple[str, str]:
        return self.opens, self.closes


QWEN3 = ReasoningFormat(name="qwen3", opens="<think>", closes="</think>")
DEEPSEEK_R1 = ReasoningFormat(
    name="deepseek_r1", opens="<think>", closes="</think>", begins_open=True
)
HARMONY_ANALYSIS = ReasoningFormat(
    name="openai_gptoss", opens="<|channel|>analysis<|message|>", closes="<|end|>"
)
MISTRAL_THINK = ReasoningFormat(name="mistral", opens="[THINK]", closes="[/THINK]")
