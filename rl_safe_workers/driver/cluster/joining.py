"""Joins a running Ray cluster, or starts a Ray for one run on the loopback interface."""

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
from rl_safe_workers.driver.cluster.interrupts import SLICE_S
from rl_safe_workers.driver.cluster.nodes import JOINING
from rl_safe_workers.errors import Awaited, ClusterError, PhaseTimeoutError, RlSafeError
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.reaping.processes import RAY_FOLDER
from rl_safe_workers.recipe import LOCAL_RAY, ray_address

LOOPBACK = "127.0.0.1"
OBJECT_STORE_BYTES = 256 * 2**20
"""Size in bytes of Ray's shared memory for a local run. Only token batches pass through it."""
TOKEN_FILE = "ray_token"
FULL_BYTES = 2**16
"""A file system with less free space in bytes counts as full."""
_HOST_AND_PORT = re.compile(r"\[?(?P<host>[^\s\]]+)\]?:(?P<port>\d+)")


def start_ray(run_folder: Path) -> None:
    """Starts a Ray that only this run uses.

    Args:
        run_folder: The run's folder for temporary files, which only its user may enter. Receives the token file and a
            folder for Ray's sockets and logs.

    Raises:
        ClusterError: If Ray does not start.
    """
    # Ray logs advice about token authentication at every start. We use tokens and do not need the advice.
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    # Ray replaces a loopback address with a reachable one, unless it considers the platform to have no clusters.
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
    except Exception as error:  # Ray also raises plain Exception
        free = shutil.disk_usage(run_folder).free
        reason = f"{run_folder.parent}, of TMPDIR, is full" if free < FULL_BYTES else _in_one_line(error)
        raise ClusterError(f"Ray could not be started: {reason}") from error


def _make_token(file: Path) -> None:
    """Gives the run's Ray its own token, which only this user can read."""
    file.touch(mode=0o600, exist_ok=False)
    file.write_text(secrets.token_hex(32), encoding="ascii")
    env.use_ray_token(file)
    # Ray caches a token, and a run that restarts has a new one. Older versions of Ray have no tokens.
    if (loader := getattr(_raylet, "AuthenticationTokenLoader", None)) is not None:
        loader.instance().reset_cache()


def join_ray(cluster: ClusterConfig, *, timeout_s: float, check: Callable[[], None]) -> None:
    """Joins a running cluster.

    Args:
        cluster: Its ``ray_address`` names the cluster to join.
        timeout_s: Seconds until the cluster must have answered.
        check: Called several times a second. An exception that it raises ends the wait.

    Raises:
        ClusterError: If there is no cluster, or it refuses.
        PhaseTimeoutError: If no Ray answers at the address in time.
    """
    asked, deadline = ray_address(cluster), Deadline.after(timeout_s)
    try:
        # This may be the address of a cluster that was killed.
        address = canonicalize_bootstrap_address(asked)
        if address is None:
            raise ClusterError(f"no Ray cluster is running on this machine (cluster.ray_address={asked})")
        match = _HOST_AND_PORT.fullmatch(address)
        if match is None:
            raise ClusterError(f"cluster.ray_address={asked} leads to {address!r}, which is not host:port")

        # Ray itself would retry for minutes, so it is called only when a process listens at the address.
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

        # Ray warns that it sets no SIGTERM handler on a thread. We do not want one.
        logging.getLogger("ray._private.worker").addFilter(_is_not_about_sigterm)
        join = partial(ray.init, address=address, log_to_driver=False, logging_level=logging.WARNING)
        try:
            # On a thread, which is abandoned if the listening process does not answer as Ray does.
            run_bounded(join, deadline, name="joining Ray", on_tick=check, tick_s=SLICE_S)
        except DeadlineExceededError:
            reason = "something listens there, and does not answer as Ray does"
            raise _no_answer(address, asked, timeout_s, reason) from None
    except RlSafeError:
        raise
    except Exception as error:  # Ray also raises plain Exception
        raise ClusterError(
            f"the Ray cluster at {asked} could not be joined (cluster.ray_address): {_in_one_line(error)}"
        ) from error


def _is_not_about_sigterm(record: logging.LogRecord) -> bool:
    return "SIGTERM handler is not set" not in record.getMessage()


def _no_answer(address: str, asked: str, timeout_s: float, reason: str) -> PhaseTimeoutError:
    error = PhaseTimeoutError(
        phase=Phase.START,
        awaited=Awaited(JOINING),
        waited_s=timeout_s,
        setting="rl_safe.timeouts.start",
        detail=f"{address}, of cluster.ray_address={asked}: {reason}",
    )
    error.is_retryable = False  # the abandoned thread may still be trying to join
    return error


def _in_one_line(error: BaseException) -> str:
    """Returns the whole message on one line. If versions differ, Ray's message has them on separate lines."""
    return " ".join(str(error).split()) or type(error).__name__
