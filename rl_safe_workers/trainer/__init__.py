"""The policy of the built-in run: log-probabilities, GRPO loss, optimizer step.

``trainer_worker.py`` is the worker class, built on `MegatronActorMixin`.
"""
