"""Our part of a vLLM worker under ms-swift's Ray mode, in which some weight syncs go wrong. In the engine's process."""

from __future__ import annotations

from typing import Any

from swift.pipelines.infer import rollout

from rl_safe_workers.adapters.swift.proved_extension import ProvedSwiftExtension
from tests.swift import real_engine

real_engine.keep_parameters()


class FaultySwiftExtension(ProvedSwiftExtension):
    """Changes weights as they come, or between the loaders and the layers."""

    _is_faulty = False

    def update_weights_from_ipc(self, *args: Any, **kwargs: Any) -> None:
        if not self._is_faulty:
            self._is_faulty = True
            real_engine.Faulty(self.model_runner.model, rollout, real_engine.faults()).install()
        super().update_weights_from_ipc(*args, **kwargs)
