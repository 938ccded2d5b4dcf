from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import deselect
from tests.integration.conftest import moe_model, quickstart
from tests.nodes.local_cluster import LocalCluster, local_cluster

__all__ = ["moe_model", "quickstart"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-phase", action="store_true", help="stop a job and lose a node in each phase, not in two")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--every-phase", default=False):
        deselect(config, items, "every_phase")


@pytest.fixture(scope="session")
def three_nodes() -> Iterator[LocalCluster]:
    with local_cluster(3) as cluster:
        yield cluster
