"""A reward without a model for the tiny GRPO runs, as a plugin of ms-swift's: short answers."""

from __future__ import annotations

from typing import Any

from swift.rewards import ORM, orms


class Brief(ORM):
    """Rewards few characters."""

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        """Returns a reward for each completion."""
        return [1.0 / (1 + len(text)) for text in completions]


orms["brief"] = Brief
