"""All hostile inputs by name, and the few of them that every run of the tests tries."""

from __future__ import annotations

import random
from collections import defaultdict
from functools import cache

from tests.hostile import (
    corpus_archives,
    corpus_checkpoints,
    corpus_folders,
    corpus_manifests,
    corpus_metadata,
    corpus_models,
    corpus_pickles,
    corpus_prompts,
    corpus_recipes,
    corpus_settings,
)
from tests.hostile.case import Case

MODULES = (
    corpus_checkpoints,
    corpus_pickles,
    corpus_archives,
    corpus_manifests,
    corpus_metadata,
    corpus_folders,
    corpus_recipes,
    corpus_settings,
    corpus_prompts,
    corpus_models,
)
QUICK = 150
QUICK_SEED = 20260801


@cache
def all_cases() -> dict[str, Case]:
    """Every input, by name."""
    found: dict[str, Case] = {}
    for module in MODULES:
        for case in module.cases():
            assert case.name not in found, f"two cases are named {case.name}"
            found[case.name] = case
    return found


def quick_cases() -> dict[str, Case]:
    """The inputs that are tried without ``--hostile``: of each kind in proportion, the same in every run."""
    kinds: defaultdict[str, list[str]] = defaultdict(list)
    for name, case in all_cases().items():
        kinds[case.kind].append(name)
    chance = random.Random(QUICK_SEED)
    orders = [chance.sample(names, len(names)) for names in kinds.values()]
    # The names by how far along the order of their kind they stand.
    ranked = sorted((place / len(names), name) for names in orders for place, name in enumerate(names))
    chosen = {name for _, name in ranked[:QUICK]}
    return {name: case for name, case in all_cases().items() if name in chosen}
