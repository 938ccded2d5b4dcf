"""Every collective, each as a function of a group and of this rank's tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d as c10d


def batch(group: dist.ProcessGroup, *ops: tuple[Any, torch.Tensor, int]) -> None:
    batched = [dist.P2POp(op, tensor, group=group, group_peer=peer) for op, tensor, peer in ops]
    for work in dist.batch_isend_irecv(batched):
        work.wait()


def _ring(group: dist.ProcessGroup, mine: torch.Tensor) -> torch.Tensor:
    rank, size, received = group.rank(), group.size(), torch.zeros_like(mine)
    batch(group, (dist.isend, mine, (rank + 1) % size), (dist.irecv, received, (rank - 1) % size))
    return received


def _pass_on(group: dist.ProcessGroup, mine: torch.Tensor) -> torch.Tensor:
    rank, received = group.rank(), torch.zeros_like(mine)
    if rank > 0:
        dist.recv(received, group=group, group_src=rank - 1)
    if rank < group.size() - 1:
        dist.send(mine + received, group=group, group_dst=rank + 1)
    return received


def _uneven_all_to_all(group: dist.ProcessGroup) -> torch.Tensor:
    """The first member sends one element to itself and five to each other; and so does every other."""
    size, share = group.size(), 1 if group.rank() == 0 else 5
    received = torch.zeros(share * size)
    sent = torch.arange(1.0 + 5 * (size - 1)) + group.rank()
    dist.all_to_all_single(received, sent, [share] * size, [1] + [5] * (size - 1), group=group)
    return received


def _coalesced(group: dist.ProcessGroup, mine: torch.Tensor) -> list[torch.Tensor]:
    sums = [mine.clone(), 2 * mine]
    with c10d._coalescing_manager(group, async_ops=True) as manager:
        for tensor in sums:
            dist.all_reduce(tensor, group=group)
    manager.wait()
    return sums


def _out(call: Callable[[Any], object], result: Any) -> Any:
    call(result)
    return result


def _many(group: dist.ProcessGroup, like: torch.Tensor) -> list[torch.Tensor]:
    return [torch.zeros_like(like) for _ in range(group.size())]


def _from_first(group: dist.ProcessGroup, like: torch.Tensor) -> torch.Tensor:
    received = torch.zeros_like(like)
    if group.rank() == 0:
        for _ in range(group.size() - 1):
            dist.recv(received, group=group, tag=1)  # from anyone
            like = like + received
    else:
        dist.send(like, group=group, group_dst=0, tag=1)
    return like


def _objects(group: dist.ProcessGroup, mine: torch.Tensor) -> list[Any]:
    gathered: list[Any] = [None] * group.size()
    dist.all_gather_object(gathered, {"from": group.rank()}, group=group)
    told = [f"told by {group.rank()}"]
    dist.broadcast_object_list(told, group=group, group_src=1)
    return gathered + told


def _in_background(group: dist.ProcessGroup, mine: torch.Tensor) -> torch.Tensor:
    work = dist.all_reduce(mine, group=group, async_op=True)
    assert work is not None
    work.wait()
    assert work.is_completed()
    return mine


COLLECTIVES: dict[str, Callable[[dist.ProcessGroup, torch.Tensor], Any]] = {
    "all_reduce": lambda g, t: _out(lambda x: dist.all_reduce(x, group=g), t),
    "all_reduce_max": lambda g, t: _out(lambda x: dist.all_reduce(x, op=dist.ReduceOp.MAX, group=g), t),
    "async": _in_background,
    "broadcast": lambda g, t: _out(lambda x: dist.broadcast(x, group=g, group_src=1), t),
    "reduce": lambda g, t: _out(lambda x: dist.reduce(x, group=g, group_dst=1), t)[: 3 * (g.rank() == 1)],
    "all_gather": lambda g, t: _out(lambda x: dist.all_gather(x, t, group=g), _many(g, t)),
    "all_gather_into": lambda g, t: _out(
        lambda x: dist.all_gather_into_tensor(x, t, group=g), torch.zeros(g.size() * len(t))
    ),
    "gather": lambda g, t: _out(
        lambda x: dist.gather(t, x, group=g, group_dst=1), _many(g, t) if g.rank() == 1 else None
    ),
    "scatter": lambda g, t: _out(
        lambda x: dist.scatter(x, [t + i for i in range(g.size())] if g.rank() == 1 else None, group=g, group_src=1),
        torch.zeros_like(t),
    ),
    "reduce_scatter": lambda g, t: _out(
        lambda x: dist.reduce_scatter_tensor(x, torch.cat([t + i for i in range(g.size())]), group=g),
        torch.zeros_like(t),
    ),
    "all_to_all": lambda g, t: _out(
        lambda x: dist.all_to_all_single(x, torch.cat([t + i for i in range(g.size())]), group=g),
        torch.zeros(g.size() * len(t)),
    ),
    "uneven_all_to_all": lambda g, t: _uneven_all_to_all(g),
    "send_recv": _pass_on,
    "recv_from_anyone": _from_first,
    "batched_p2p": _ring,
    "coalesced": _coalesced,
    "objects": _objects,
    "functional_all_reduce": lambda g, t: functional.wait_tensor(functional.all_reduce(t, "sum", g)),
    "functional_all_to_all": lambda g, t: functional.wait_tensor(
        functional.all_to_all_single(torch.cat([t + i for i in range(g.size())]), None, None, g)
    ),
    "barrier": lambda g, t: dist.barrier(group=g),
}


def all_collectives(group: dist.ProcessGroup) -> dict[str, Any]:
    results = {}
    for name, collective in COLLECTIVES.items():
        result = collective(group, torch.arange(3.0) + 10 * dist.get_rank())
        tensors = [result] if isinstance(result, torch.Tensor) else result
        results[name] = None if tensors is None else [t.tolist() if isinstance(t, torch.Tensor) else t for t in tensors]
    return results
