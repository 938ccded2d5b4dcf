"""How far it is from a public call to the call of torch, Megatron or the file system that does the work.

Each operation is followed with ``sys.setprofile``, on every thread that it starts. Helpers in ``control`` and
``errors`` are not counted.
"""

from __future__ import annotations

import pytest

from tests.distributed.call_paths import MOST, TRAINERS, WORK, Path_, life
from tests.distributed.ranks import run_ranks, values
from tests.distributed.worker import run_config


@pytest.fixture(scope="module")
def paths(seeded_models, tmp_path_factory) -> dict[str, dict[str, set[Path_]]]:
    """The modules that rank 0 went through, by operation and foreign call."""
    from tests.distributed.worker import served_store

    with served_store() as address:
        config, root = run_config(seeded_models["moe"], ep=2), tmp_path_factory.mktemp("checkpoints")
        found: dict[str, dict[str, set[Path_]]] = values(run_ranks(life, TRAINERS + 1, address, config, root))[0]
    return found


@pytest.mark.parametrize("operation", WORK)
def test_the_work_is_reached_through_three_modules_at_most(operation, paths) -> None:
    assert paths[operation].keys() == WORK[operation], "all of the work was followed"
    too_far = {name: path for name, of in paths[operation].items() for path in of if len(path) > MOST}
    assert not too_far
