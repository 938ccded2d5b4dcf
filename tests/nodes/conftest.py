from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.conftest import moe_model, quickstart
from tests.nodes.local_cluster import LocalCluster, local_cluster

__all__ = ["moe_model", "quickstart"]


@pytest.fixture(scope="session")
def three_nodes() -> Iterator[LocalCluster]:
    with local_cluster(3) as cluster:
        yield cluster
