"""Stand-ins for the commands of Slurm and Ray, and a batch job that runs the launcher with them."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "ray_configs" / "slurm_4x8.sbatch"
NODES = ["gpu-01", "gpu-02", "gpu-03", "gpu-04"]
SRUN_STUB = """
for argument in "$@"; do case $argument in --nodelist=*) node=${argument#*=} ;; esac; done
while [[ ${1:-} == --* ]]; do shift; done
SLURMD_NODENAME=${node:-all} exec "$@"
"""
RAY_STUB = """
node=${SLURMD_NODENAME:-batch}
case "$1 ${2:-}" in
"start "*)
    echo "$node: $RAY_AUTH_MODE: ray $*" >>calls
    [[ $node == "${LATE_NODE:-}" ]] && exec sleep 60
    [[ $node == "${BAD_NODE:-}" ]] && exit 1
    echo "$node" >>joined
    until [[ -e stopped ]]; do sleep 0.05; done ;;
"health-check "*) [[ -s joined ]] ;;
"list nodes") sed 's/^/    node_name: /' joined ;;
"job submit")
    echo "$node: ray $*" >>calls
    [[ -e asked_once || -z "${NO_AGENT:-}" ]] || { [[ $NO_AGENT == forever ]] || touch asked_once; exit 1; }
    echo "RUNNING None" >state ;;
"job logs")
    touch running
    [[ -z "${BROKEN_STREAM:-}" || -e broken ]] || { touch broken; exit 0; }
    until [[ -e finish ]]; do sleep 0.05; done ;;
"job stop")
    echo "$node: ray $*" >>calls
    echo "STOPPED None" >state
    touch finish ;;
"stop "*) echo "$node: ray $*" >>calls; touch stopped ;;
esac
"""
STUBS = {
    "srun": SRUN_STUB,
    "ray": RAY_STUB,
    "scontrol": f"[[ $* == 'show hostnames gpu-[01-04]' ]] && printf '%s\\n' {' '.join(NODES)}",
    "hostname": "echo 10.0.0.1 fe80::1",
    # Asked for the job's state.
    "python": 'cat >/dev/null; echo "$2 $3" >asked; [[ -z "${NO_ANSWER:-}" ]] && cat state',
}
"""Slurm's commands and Ray's, as far as the script sees them; their state is in files of the working directory."""


def write_stub(path: Path, text: str) -> None:
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


class Batch:
    """The batch script in progress, on nodes that are not there."""

    def __init__(self, folder: Path, *arguments: str, **variables: str) -> None:
        self.folder = folder
        stubs = folder / "bin"
        stubs.mkdir()
        for name, text in STUBS.items():
            write_stub(stubs / name, text)
        given = {"SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "gpu-[01-04]"}
        path = f"{stubs}{os.pathsep}{os.environ['PATH']}"
        with (folder / "err").open("wb") as err:
            self.process = subprocess.Popen(
                ["bash", str(SCRIPT), *arguments],
                env={"PATH": path, "POLL_S": "0.05", **given, **variables},
                stdout=err,
                stderr=err,
                start_new_session=True,
            )

    def wait_for(self, name: str) -> None:
        deadline = time.monotonic() + 30
        while not (self.folder / name).exists():
            assert time.monotonic() < deadline, f"no {name}"
            assert self.process.poll() is None
            time.sleep(0.02)

    def end_run(self, state: str) -> None:
        (self.folder / "state").write_text(state)
        (self.folder / "finish").touch()

    def finish(self) -> tuple[int, str]:
        code = self.process.wait(timeout=30)
        return code, (self.folder / "err").read_text()

    @property
    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()
