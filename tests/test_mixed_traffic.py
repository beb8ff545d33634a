"""The study's traffic, as the simulations send it."""

from __future__ import annotations

from lab.simulation.mixed_traffic import CLASSES, FILES, LONG_PROMPTS, TASKS, Load, traffic


def test_replayed_prompts_are_few_and_as_long_as_the_study_says() -> None:
    load = Load(rate=32.0, count=2000, seed=1, slo="study", replayed=True)
    arrivals = traffic(load, deadlines=False)
    for kind, (_, (shortest, longest), _, _) in CLASSES.items():
        prompts = [each.request.prompt for each in arrivals if each.kind == kind]
        different = len(FILES) * TASKS if kind in LONG_PROMPTS else len(prompts)
        assert len(set(prompts)) == different
        lengths = [len(prompt) for prompt in prompts]
        assert shortest <= min(lengths) + 75 and max(lengths) <= longest + 75
