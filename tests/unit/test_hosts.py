"""Which ranks share a host, and if the hosts are connected by sockets."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import HashStore

from rl_safe_workers.comms import hosts
from rl_safe_workers.comms.hosts import NO_HOSTS, Hosts, own_host
from rl_safe_workers.control.plane import ControlPlane
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.ranks import trainer_id


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in ("NCCL_NET", "NCCL_NET_PLUGIN", "NCCL_IB_DISABLE", "NCCL_HOSTID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(hosts, "_RDMA_DEVICES", tmp_path / "infiniband")
    return tmp_path / "infiniband"


def test_members_on_the_same_host_are_counted() -> None:
    found = Hosts({0: "a", 1: "a", 2: "b", 3: "b"})
    assert [found.near(0, members) for members in ((0, 1, 2, 3), (0, 2), (0, 1))] == [2, 1, 2]


def test_unknown_hosts_and_other_networks_do_not_tell() -> None:
    assert NO_HOSTS.near(0, (0, 1)) is None
    assert Hosts({0: "a", 1: "rdmab"}).near(0, (0, 1)) is None
    assert Hosts({0: "a"}).near(0, (0, 1)) is None


def test_ranks_with_another_host_id_of_nccl_are_on_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    here = own_host()
    monkeypatch.setenv("NCCL_HOSTID", "rank1")
    there = own_host()
    assert here != there
    assert own_host() == there


@pytest.mark.parametrize(
    ("variables", "has_device", "is_rdma"),
    [
        ({}, False, False),
        ({}, True, True),
        ({"NCCL_IB_DISABLE": "1"}, True, False),
        ({"NCCL_NET": "Socket"}, True, False),
        ({"NCCL_NET_PLUGIN": "aws-ofi"}, False, True),
        ({"NCCL_NET_PLUGIN": "none"}, False, False),
    ],
)
def test_another_network_than_sockets_is_noticed(
    variables: dict[str, str], has_device: bool, is_rdma: bool, no_network: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if has_device:
        (no_network / "mlx5_0").mkdir(parents=True)
    assert own_host().startswith("rdma") is is_rdma


def test_a_rank_that_does_not_come_has_no_host() -> None:
    control = ControlPlane(
        HashStore(), world="training", rank=0, members=[trainer_id(0), trainer_id(1)], secret=bytes(32)
    )
    found = hosts.hosts_of_ranks(control, phase=Phase.GROUPS, timeout=timedelta(seconds=0.2))
    assert found.by_rank == {0: own_host()}
