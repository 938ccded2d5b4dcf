"""A plugin of ms-swift with the reward of the tiny GRPO runs. It needs no model, and rewards short answers."""

from __future__ import annotations

from typing import Any

from swift.rewards import ORM, orms


class Brief(ORM):
    """Rewards short answers: the fewer characters, the higher the reward."""

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        """Returns a reward for each completion."""
        return [1.0 / (1 + len(text)) for text in completions]


orms["brief"] = Brief
