"""A Ray cluster of several nodes on this machine, each with an address of its own on the loopback network."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from rl_safe_workers import env
from rl_safe_workers.ports import port_to_listen_on
from tests.integration.runs import MARK, REPOSITORY, marked_processes

START_S = 120.0
SETTLE_S = 5.0
OF_A_RUN = ("rl_safe_workers.reaping.guardian", "rl_safe_workers run", "rl-safe run", "ray::NodeAgent", "ray::Trainer")
CPUS = 2
"""CPUs of each node, as Ray counts them."""
_RAY = [sys.executable, "-m", "ray.scripts.scripts"]


class LocalCluster:
    """Nodes are numbered from 0, which is the head; each has its own ports and directories."""

    def __init__(self, *, cpus: int = CPUS, gpus: int = 0) -> None:
        """Starts nothing yet.

        Args:
            cpus: Of each node, as Ray is told.
            gpus: The same; nobody touches them.
        """
        self._cpus, self._gpus = cpus, gpus
        self._mark = uuid.uuid4().hex
        # Sockets lie below, and their paths must stay short.
        self.folder = Path(tempfile.mkdtemp(prefix="n"))
        self.home = self.folder / "home"
        self.home.mkdir()
        number = os.getpid()
        self._network = f"127.{1 + number % 250}.{number // 250 % 250}"
        self._port, self._dashboard_port = port_to_listen_on(self.address(0)), port_to_listen_on("127.0.0.1")
        self.nodes: list[int] = []
        self._jobs: list[Job] = []

    def address(self, node: int) -> str:
        return f"{self._network}.{2 + node}"

    @property
    def ray_address(self) -> str:
        return f"{self.address(0)}:{self._port}"

    @property
    def dashboard(self) -> str:
        """Where jobs are submitted."""
        return f"http://127.0.0.1:{self._dashboard_port}"

    @property
    def environment(self) -> dict[str, str]:
        """For the nodes, and for whoever talks to them."""
        variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        return variables | {
            MARK: self._mark,
            "PATH": path,
            "HOME": str(self.home),
            "PYTHONPATH": str(REPOSITORY),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": TOKEN,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "5",  # see scripts/test
            "HF_HUB_OFFLINE": "1",
            "TMPDIR": str(self.folder),
        }

    def start(self, nodes: int) -> None:
        """Starts the head and further nodes, side by side."""
        self._start_node(
            0,
            f"--port={self._port}",
            "--head",
            "--include-dashboard=true",
            "--dashboard-host=127.0.0.1",
            f"--dashboard-port={self._dashboard_port}",
            f"--ray-client-server-port={port_to_listen_on(self.address(0))}",
        )
        with ThreadPoolExecutor() as pool:
            list(pool.map(self.add_node, range(1, nodes)))
        self.nodes.sort()
        self.wait_until(lambda: self.takes_jobs, "an agent takes jobs")

    def add_node(self, node: int, *, python_path: Path = REPOSITORY) -> None:
        """Starts a node that is not there, or no more; with another package than ours, if told."""
        self._start_node(node, f"--address={self.ray_address}", python_path=python_path)

    def _start_node(self, node: int, *options: str, python_path: Path = REPOSITORY) -> None:
        address = self.address(node)
        command = [
            *_RAY,
            "start",
            f"--node-ip-address={address}",
            f"--temp-dir={self.folder / str(node)}",
            f"--num-cpus={self._cpus}",
            f"--num-gpus={self._gpus}",
            f"--object-store-memory={100 * 2**20}",
            f"--dashboard-agent-listen-port={port_to_listen_on(address)}",
            *options,
        ]
        self._launch(command, self.environment | {"PYTHONPATH": str(python_path)})
        self.nodes.append(node)

    def _launch(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Runs ``ray start`` until the node is up."""
        done = subprocess.run(
            command, env=environment, cwd=self.folder, capture_output=True, text=True, timeout=START_S, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

    @property
    def takes_jobs(self) -> bool:
        return self.job("list").returncode == 0

    def living(self) -> int:
        """Nodes that Ray takes for alive."""
        done = subprocess.run(
            [*_RAY, "status", f"--address={self.ray_address}"],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return done.stdout.partition("Pending:")[0].count(" node_")

    def kill_node(self, node: int) -> None:
        """Ends a node without a word: its raylet is killed, and what belongs to it goes with it."""
        self.nodes.remove(node)
        for process in self.processes():
            with suppress(psutil.Error):
                line = process.cmdline()
                if line and Path(line[0]).name == "raylet" and f"--node_ip_address={self.address(node)}" in line:
                    process.send_signal(signal.SIGKILL)

    def job(self, verb: str, *arguments: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Runs ``ray job VERB ...`` to its end."""
        return subprocess.run(
            self.job_command(verb, *arguments),
            env=self.environment,
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def job_command(self, verb: str, *arguments: str) -> list[str]:
        return [*_RAY, "job", verb, f"--address={self.dashboard}", *arguments]

    def submit(self, name: str, command: Sequence[str], *options: str) -> Job:
        """Submits a job, and goes on."""
        self._jobs.append(Job(self, name, [*options, f"--submission-id={name}", "--", *command]))
        return self._jobs[-1]

    def end_jobs(self) -> None:
        """Stops the jobs that still run."""
        running = [job for job in self._jobs if job.process.poll() is None]
        self._jobs.clear()
        for job in running:
            job.stop()
        for job in running:
            job.finish(timeout_s=90)

    def processes(self) -> list[psutil.Process]:
        """Everything alive that has come from this cluster."""
        return marked_processes(self._mark)

    def left_of_runs(self) -> list[str]:
        """Processes of runs and temporary folders, once Ray has had a moment to end the actors that were killed."""
        deadline = time.monotonic() + SETTLE_S
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return left

    def _left(self) -> list[str]:
        found = []
        for process in self.processes():
            with suppress(psutil.Error):
                line = " ".join(process.cmdline())
                if env.RUN_ID in process.environ() or any(text in line for text in OF_A_RUN):
                    found.append(f"process {process.pid}: {line[:150]}")
        return found + [str(path) for path in self.folder.glob("rl_safe_*")]

    def wait_until(self, condition: Callable[[], bool], what: str, *, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
            time.sleep(0.2)

    def close(self) -> None:
        """Ends every process that has come from this cluster."""
        for _ in range(3):  # what is just starting another one is met by the next round
            for process in self.processes():
                with suppress(psutil.Error):
                    process.send_signal(signal.SIGKILL)
            time.sleep(0.3)
        shutil.rmtree(self.folder, ignore_errors=True)


TOKEN = secrets.token_hex(24)


class SeparateMachines(LocalCluster):
    """Nodes that cannot see each other's processes, as on machines of their own. This process sees all of them."""

    def __init__(self, **options: int) -> None:
        super().__init__(**options)
        self._machines: list[subprocess.Popen[bytes]] = []

    def close(self) -> None:
        super().close()
        for machine in self._machines:
            machine.wait()

    def _launch(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        # The first process of a namespace has to stay: its end would be that of all others.
        script = f"{shlex.join(command)} && exec sleep infinity"
        own = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        log = self.folder / f"start_{uuid.uuid4().hex}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                ["unshare", *own, "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c", script],
                env=environment,
                cwd=self.folder,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )
        self._machines.append(process)
        deadline = time.monotonic() + START_S
        while "Ray runtime started" not in (text := log.read_text(errors="replace")):
            assert process.poll() is None, text
            assert time.monotonic() < deadline, text
            time.sleep(0.2)


class Job:
    """A submitted job, whose log ``ray job submit`` streams."""

    def __init__(self, cluster: LocalCluster, name: str, arguments: Sequence[str]) -> None:
        self._cluster, self.name = cluster, name
        self._log = cluster.folder / f"{name}.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                cluster.job_command("submit", *arguments),
                env=cluster.environment,
                cwd=REPOSITORY,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )

    @property
    def out(self) -> str:
        """The text that has been streamed so far, without colours."""
        return re.sub(r"\x1b\[[0-9;]*m", "", self._log.read_text(errors="replace"))

    @property
    def status(self) -> str:
        """Ray's word for how it is, in capitals."""
        words = self._cluster.job("status", self.name).stdout
        found = re.findall(r"PENDING|RUNNING|STOPPED|SUCCEEDED|FAILED", re.sub(r"\x1b\[[0-9;]*m", "", words).upper())
        return found[-1] if found else words

    def wait_for(self, condition: Callable[[], bool], what: str, *, timeout_s: float = 180.0) -> None:
        """Waits while the job runs; fails if it ends before, or takes too long."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"ended before {what}:\n{self.out[-3000:]}"
            assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}\n{self.out[-3000:]}"
            time.sleep(0.1)

    def stop(self) -> None:
        """``ray job stop``, without waiting for what comes of it."""
        stopped = self._cluster.job("stop", "--no-wait", self.name)
        assert stopped.returncode == 0, stopped.stdout + stopped.stderr

    def finish(self, *, timeout_s: float = 240.0) -> int:
        """Waits for the end; returns the exit status of ``ray job submit``."""
        return self.process.wait(timeout_s)


@contextmanager
def local_cluster(nodes: int, *, kind: type[LocalCluster] = LocalCluster, **options: int) -> Iterator[LocalCluster]:
    cluster = kind(**options)
    try:
        cluster.start(nodes)
        yield cluster
    finally:
        cluster.close()


def environment_file(folder: Path, variables: Mapping[str, str]) -> Path:
    """A runtime environment of variables alone."""
    file = folder / "runtime_env.yaml"
    file.write_text("env_vars:\n" + "".join(f'  {name}: "{value}"\n' for name, value in variables.items()))
    return file
