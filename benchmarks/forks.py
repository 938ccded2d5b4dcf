"""Runs jobs in forks. Each fork begins with everything imported and no device touched, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any


def in_a_fork(work: Callable[[], Mapping[str, Any]], result: Path) -> bool:
    """Runs work in a fork of this process and waits for its end; returns True if it succeeded.

    Args:
        work: Returns JSON values.
        result: File for these values. The traceback of a failure goes to a file beside it, with the suffix ``.error``.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            result.write_text(json.dumps(work()), encoding="utf-8")
            code = 0
        except BaseException:
            result.with_suffix(".error").write_text(traceback.format_exc(), encoding="utf-8")
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return status == 0


def run_jobs_of_rank(measure: Callable[[Mapping[str, Any], int], Mapping[str, Any]]) -> None:
    """Runs this rank's part of all jobs, one after the other, each in a fork; ends the process.

    The command line is ``RANK JOBS``; ``JOBS`` is a JSON file. It writes each job's fields and figures to
    ``<number>_<rank>.json`` beside that file. The exit status is 1 if a job has failed.

    Args:
        measure: Takes the fields of a job and the rank; returns the figures.
    """
    rank, jobs_file = int(sys.argv[1]), Path(sys.argv[2])

    def work(fields: Mapping[str, Any]) -> dict[str, Any]:
        return {**fields, **measure(fields, rank)}

    jobs = json.loads(jobs_file.read_text(encoding="utf-8"))
    done = [in_a_fork(partial(work, job), jobs_file.with_name(f"{n}_{rank}.json")) for n, job in enumerate(jobs)]
    sys.exit(0 if all(done) else 1)
