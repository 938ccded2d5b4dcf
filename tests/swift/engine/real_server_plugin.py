"""Puts real engines into a job of Ray mode: a plugin for --external_plugins, after ours."""

from __future__ import annotations

import os

if "RANK" not in os.environ:
    from swift.ray.megatron.rollout import vllm_server

    from tests.swift.real_server import RealServer

    vllm_server.VllmServer = RealServer
