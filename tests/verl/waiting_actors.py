"""Actors and remote functions for tests. This module imports neither verl nor torch, so they start fast."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import ray

SILENT_S = 60.0


@ray.remote(num_cpus=0)
class Server:
    """A rollout server; one of its calls may have no answer, and another one may fail."""

    def __init__(self, silent: str = "", fails: str = "") -> None:
        self._silent, self._fails = silent, fails

    async def sleep(self) -> None:
        self._answer("sleep")

    async def clear_kv_cache(self) -> None:
        self._answer("clear_kv_cache")

    def _answer(self, call: str) -> None:
        if self._silent == call:
            time.sleep(SILENT_S)
        if self._fails == call:
            raise AssertionError("Memory usage increased after sleeping.")

    async def pid(self) -> int:
        return os.getpid()


@ray.remote(num_cpus=0)
class Rank:
    """A training rank whose sync fails, or never ends."""

    def __init__(self, error: Exception | None) -> None:
        self._error = error

    def update_weights(self) -> None:
        if self._error is not None:
            raise self._error
        time.sleep(SILENT_S)


@ray.remote(num_cpus=0)
class Engine:
    """A rollout server that raises."""

    async def generate(self) -> None:
        raise MemoryError("no room for the prompt")

    async def clear_kv_cache(self) -> None:
        """It is well otherwise."""


class PlainLoop:
    """The part of verl's agent loop worker that an engine's error comes through."""

    async def _run_agent_loop(self, engine: Any) -> None:
        await engine.generate.remote()

    async def run(self, engine: Any) -> str:
        (error,) = await asyncio.gather(self._run_agent_loop(engine), return_exceptions=True)
        return type(error).__name__


@ray.remote(num_cpus=0)
def answer(failures: dict[int, str]) -> dict[int, str]:
    return failures


@ray.remote(num_cpus=0)
def hang() -> None:
    time.sleep(SILENT_S)
