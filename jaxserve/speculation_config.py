"""Settings of speculative decoding, from --speculative-config."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.config import VERIFY_POSITIONS, ConfigError

SPECULATION_METHODS = ("ngram", "suffix")
"""vLLM's names. Both look up an earlier occurrence of the newest tokens and draft the tokens that
followed it."""

HEAD_METHODS = ("dflash", "dspark", "eagle3", "draft_model")
"""Methods that need a draft head or a draft model. Its files tell which of them it is."""

MTP_METHODS = ("mtp", "qwen3_next_mtp", "qwen3_5_mtp")
"""vLLM's names of drafting with the multi-token prediction weights of the model's checkpoint."""


@dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    """How next tokens are drafted, and how many drafts a step verifies."""

    drafts: int = max(VERIFY_POSITIONS) - 1
    """The most drafts per row; 0: no speculation."""
    least_match: int = 3
    """The shortest match, in tokens, from which drafts are taken."""
    most_match: int = 32
    """The longest match that is searched for, in tokens."""
    shared_tokens: int = 0
    """Output tokens that are kept for lookups by later requests of the same tenant; 0: none."""
    model: str | None = None
    """A folder, Hub id or short name of a draft head or draft model; None: the drafter has no
    weights."""
    native: bool = False
    """Whether the multi-token prediction weights of the model's checkpoint make the drafts."""

    def __post_init__(self) -> None:
        if self.drafts < 0:
            raise ConfigError(f"num_speculative_tokens must be at least 1, got {self.drafts}")
        if not 1 <= self.least_match <= self.most_match:
            raise ConfigError(
                "prompt_lookup_min must be at least 1 and at most prompt_lookup_max, got "
                f"{self.least_match} and {self.most_match}"
            )

    @property
    def positions(self) -> tuple[int, ...]:
        """Positions per row of each verify bucket that is needed."""
        if not self.drafts:
            return ()
        most = next((p for p in VERIFY_POSITIONS if p > self.drafts), VERIFY_POSITIONS[-1])
        return tuple(each for each in VERIFY_POSITIONS if each <= most)


NO_SPECULATION = SpeculationConfig(drafts=0)
