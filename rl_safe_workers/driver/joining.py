"""Ray for one run: a cluster that is there already, or one of its own on the loopback interface."""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import ray
from ray import _raylet
from ray._private import ray_constants
from ray._private.services import canonicalize_bootstrap_address

from rl_safe_workers import env
from rl_safe_workers.config import ClusterConfig
from rl_safe_workers.control.deadline import Deadline, DeadlineExceededError, run_bounded
from rl_safe_workers.driver.interrupts import SLICE_S
from rl_safe_workers.driver.nodes import JOINING
from rl_safe_workers.errors import Awaited, ClusterError, PhaseTimeoutError, RlSafeError
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.reaping.processes import RAY_FOLDER
from rl_safe_workers.recipe import LOCAL_RAY, ray_address

LOOPBACK = "127.0.0.1"
OBJECT_STORE_BYTES = 256 * 2**20
"""Ray's shared memory for a local run; only token batches pass through it."""
TOKEN_FILE = "ray_token"
FULL_BYTES = 2**16
"""Free space of a file system, in bytes, that counts as none."""
_HOST_AND_PORT = re.compile(r"\[?(?P<host>[^\s\]]+)\]?:(?P<port>\d+)")


def start_ray(run_folder: Path) -> None:
    """Starts Ray for this run alone.

    Args:
        run_folder: The run's own folder for temporary files, which only its user may enter. Gets the token, and below
            it a folder for Ray's sockets and logs.

    Raises:
        ClusterError: If it does not start.
    """
    # Ray advises on its token authentication at every start; the token is wanted, the advice is not.
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    # Ray replaces a loopback address by a reachable one, unless it believes that this platform has no clusters.
    env.keep_ray_on_loopback()
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        _make_token(run_folder / TOKEN_FILE)
        ray.init(
            address=LOCAL_RAY,
            num_cpus=len(os.sched_getaffinity(0)),
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.WARNING,
            _node_ip_address=LOOPBACK,
            _temp_dir=str(run_folder / RAY_FOLDER),
            # Idle workers would compete with the actors' imports for the cores.
            _system_config={"prestart_worker_first_driver": False},
        )
    except Exception as error:  # Ray raises a bare one, too
        free = shutil.disk_usage(run_folder).free
        reason = f"{run_folder.parent}, of TMPDIR, is full" if free < FULL_BYTES else _in_one_line(error)
        raise ClusterError(f"Ray could not be started: {reason}") from error


def _make_token(file: Path) -> None:
    """Gives the run's Ray a token of its own, which nobody but this user can read."""
    file.touch(mode=0o600, exist_ok=False)
    file.write_text(secrets.token_hex(32), encoding="ascii")
    env.use_ray_token(file)
    # Ray remembers a token, and a run that starts again has another one. An older Ray has no tokens.
    if (loader := getattr(_raylet, "AuthenticationTokenLoader", None)) is not None:
        loader.instance().reset_cache()


def join_ray(cluster: ClusterConfig, *, timeout_s: float, check: Callable[[], None]) -> None:
    """Joins a running cluster.

    Args:
        cluster: Its ``ray_address`` says which.
        timeout_s: Seconds until it must have answered.
        check: Called several times a second; what it raises ends the wait.

    Raises:
        ClusterError: If there is none, or it refuses.
        PhaseTimeoutError: If nothing answers at the address in time.
    """
    asked, deadline = ray_address(cluster), Deadline.after(timeout_s)
    try:
        # A cluster that ended without a word has left its address behind.
        address = canonicalize_bootstrap_address(asked)
        if address is None:
            raise ClusterError(f"no Ray cluster is running on this machine (cluster.ray_address={asked})")
        match = _HOST_AND_PORT.fullmatch(address)
        if match is None:
            raise ClusterError(f"cluster.ray_address={asked} leads to {address!r}, which is not host:port")

        # Ray itself would try for minutes, so it is asked once something listens there.
        is_listening = False
        while not is_listening:
            check()
            try:
                socket.create_connection((match["host"], int(match["port"])), timeout=SLICE_S).close()
                is_listening = True
            except OSError as error:
                if deadline.expired:
                    raise _no_answer(address, asked, timeout_s, str(error)) from error
                time.sleep(SLICE_S)

        # Ray warns that it sets no handler for SIGTERM on a thread: nor is it to.
        logging.getLogger("ray._private.worker").addFilter(_is_not_about_sigterm)
        join = partial(ray.init, address=address, log_to_driver=False, logging_level=logging.WARNING)
        try:
            # On a thread, which is left behind if what listens there does not talk as Ray does.
            run_bounded(join, deadline, name="joining Ray", on_tick=check, tick_s=SLICE_S)
        except DeadlineExceededError:
            reason = "something listens there, and does not answer as Ray does"
            raise _no_answer(address, asked, timeout_s, reason) from None
    except RlSafeError:
        raise
    except Exception as error:  # Ray raises a bare one, too
        raise ClusterError(
            f"the Ray cluster at {asked} could not be joined (cluster.ray_address): {_in_one_line(error)}"
        ) from error


def _is_not_about_sigterm(record: logging.LogRecord) -> bool:
    return "SIGTERM handler is not set" not in record.getMessage()


def _no_answer(address: str, asked: str, timeout_s: float, reason: str) -> PhaseTimeoutError:
    error = PhaseTimeoutError(
        phase=Phase.START, awaited=Awaited(JOINING), waited_s=timeout_s,
        setting="rl_safe.timeouts.start", detail=f"{address}, of cluster.ray_address={asked}: {reason}",
    )  # fmt: skip
    error.may_pass = False  # what was left behind may still be trying
    return error


def _in_one_line(error: BaseException) -> str:
    """All of it: where versions differ, Ray has them on lines of their own."""
    return " ".join(str(error).split()) or type(error).__name__
