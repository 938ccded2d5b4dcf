"""Runs one rank of ``comms_limits``: ``python -m benchmarks.comms_limits_ranks RANK SIZE PORT OUT``.

The ranks form groups of two, then of four if there are four ranks. They make one group per limit of CTAs, in turn.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.comms_limits import COLLECTIVES, LIMITS, MESSAGES_MIB, SCALAR, SIZES
from benchmarks.gpu import HOSTS
from rl_safe_workers.comms.kernels import loaded_kernels
from rl_safe_workers.platforms.device_memory import outside_torch

MIB = 2**20
WAIT = timedelta(seconds=60)
_WHILE_S = 0.3
_WARM, _SAMPLES, _SCALAR_CALLS = 3, 5, 200
_CALLS, _LARGE_CALLS = (20, 6) if HOSTS == "one" else (5, 2)


def collectives(group: dist.ProcessGroup, out: torch.Tensor, given: torch.Tensor) -> dict[str, Callable[[int], None]]:
    """Returns a group's collectives by name. Each takes the number of the message's elements that one rank holds."""
    ranks = dist.get_process_group_ranks(group)
    size, me = len(ranks), dist.get_rank(group)
    following, previous = ranks[(me + 1) % size], ranks[(me - 1) % size]

    def batched(n: int) -> None:
        ops = [dist.P2POp(dist.isend, given[:n], following, group), dist.P2POp(dist.irecv, out[:n], previous, group)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    def unbatched(n: int, *, back: bool = False) -> None:
        # In pairs: even ranks send to odd ranks, or odd ranks to even ranks.
        if (me % 2 == 0) is not back:
            dist.send(given[:n], ranks[me ^ 1], group=group)
        else:
            dist.recv(out[:n], ranks[me ^ 1], group=group)

    return {
        "all_reduce": lambda n: dist.all_reduce(given[:n], group=group),
        "all_gather": lambda n: dist.all_gather_into_tensor(out[:n], given[: n // size], group=group),
        "reduce_scatter": lambda n: dist.reduce_scatter_tensor(out[: n // size], given[:n], group=group),
        "all_to_all": lambda n: dist.all_to_all_single(out[:n], given[:n], group=group),
        "batched_p2p": batched,
        "unbatched_p2p": unbatched,
        "unbatched_p2p back": partial(unbatched, back=True),
    }


def measure(rank: int, ranks: int) -> Iterator[dict[str, Any]]:
    """Yields a record for each collective of each group, with bytes of its first call or seconds of a message."""
    device = torch.device("cuda", torch.cuda.current_device())
    probe = outside_torch(device) or (lambda: 0)
    largest = max(MESSAGES_MIB)
    elements = largest * MIB // 2
    given, out = (torch.zeros(elements, dtype=torch.bfloat16, device=device) for _ in range(2))
    with loaded_kernels(device, probe, timeout=WAIT) as kernels:
        yield {"size": 1, "max_ctas": 1, "bytes": {"kernels": kernels.bytes}, "seconds": {}}
    for size in (size for size in SIZES if size <= ranks):
        # The first group is discarded: it warms up the clocks, and CUDA loads the rest of its code.
        for discarded, limit in ((True, None), *((False, limit) for limit in LIMITS)):
            group = _group(rank, ranks, size, limit)
            calls, seconds = collectives(group, out, given), {}
            grown = {name: _first(call, probe) for name, call in calls.items()}
            for name in COLLECTIVES:
                for mib in MESSAGES_MIB:
                    call = partial(calls[name], mib * MIB // 2)
                    seconds[f"{name} {mib} MiB"] = _seconds(call, calls=_LARGE_CALLS if mib == largest else _CALLS)
            seconds[SCALAR] = _seconds(partial(calls["all_reduce"], 1), calls=_SCALAR_CALLS)
            if not discarded:
                yield {"size": size, "max_ctas": limit, "bytes": grown, "seconds": seconds}
            dist.barrier(group=dist.group.WORLD)
            dist.destroy_process_group(group)
            _settle(probe)


def _group(rank: int, ranks: int, size: int, limit: int | None) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    if limit is not None:
        options.config.max_ctas = limit
    blocks = [list(range(first, first + size)) for first in range(0, ranks, size)]
    groups = [dist.new_group(block, backend="nccl", pg_options=options, timeout=WAIT) for block in blocks]
    return groups[rank // size]


def _settle(probe: Callable[[], int]) -> None:
    """Waits until memory has stopped changing, because communicators may end in a thread."""
    before, used = -1, probe()
    while used != before:
        time.sleep(_WHILE_S)
        before, used = used, probe()
    dist.barrier(group=dist.group.WORLD)


def _first(call: Callable[[int], None], probe: Callable[[], int]) -> int:
    before = probe()
    call(64)
    torch.cuda.synchronize()
    return probe() - before


def _seconds(call: Callable[[], None], *, calls: int) -> float:
    for _ in range(_WARM):
        call()
    dist.barrier(group=dist.group.WORLD)
    torch.cuda.synchronize()
    samples = []
    for _ in range(_SAMPLES):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(calls):
            call()
        end.record()
        torch.cuda.synchronize()
        samples.append(float(start.elapsed_time(end)) / 1e3 / calls)
    return median(samples)


def main() -> None:
    """Runs this rank's part; writes ``OUT/<rank>.json``."""
    rank, ranks, port, out = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    torch.cuda.set_device(0)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=WAIT)
    # The default group uses gloo, so that its barriers touch no device.
    dist.init_process_group("gloo", store=dist.PrefixStore("limits", store), rank=rank, world_size=ranks)
    records = []
    try:
        for record in measure(rank, ranks):
            records.append(record)
            (out / f"{rank}.json").write_text(json.dumps(records), encoding="utf-8")
    except BaseException:
        (out / f"{rank}.error").write_text(traceback.format_exc(), encoding="utf-8")
        raise
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
