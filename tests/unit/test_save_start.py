"""Copies of a save in the background that do not fit into the host memory of their host are named."""

from __future__ import annotations

from rl_safe_workers.checkpoint.save.save_start import StartReport, short_of_memory

GIB = 2**30


def report(host: str, *, staged: int, free: int) -> StartReport:
    return StartReport(digest="", size_bytes=0, host=host, staged_bytes=staged * GIB, free_memory_bytes=free * GIB)


def test_the_copies_of_a_host_are_counted_together() -> None:
    on_a, on_b = report("a", staged=4, free=7), report("b", staged=4, free=8)
    assert short_of_memory([on_b, on_b]) == []
    (text,) = short_of_memory([on_a, on_b, on_a, on_b])
    assert text.startswith("the copies of training rank 0, 2 take 8.0 GiB of host memory, and 7.0 GiB are free there")


def test_a_copy_that_is_kept_from_an_earlier_save_needs_no_memory() -> None:
    assert short_of_memory([report("a", staged=0, free=0)] * 2) == []
