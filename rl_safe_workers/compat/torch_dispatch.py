"""Sees every operator that torch runs. ``TorchDispatchMode`` is in a private module. Seen in torch 2.11 and 2.13."""

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode"]
