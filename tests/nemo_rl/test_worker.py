"""The worker that NeMo RL imports by name, over any class of that name."""

from __future__ import annotations

import importlib
import inspect
import sys
from types import ModuleType
from typing import Any

import pytest

from rl_safe_workers.adapters.nemo_rl.contract import NAMES
from rl_safe_workers.adapters.nemo_rl.mixin import SafePolicyMixin
from tests.nemo_rl.host import HostImpl

HOST = SafePolicyMixin.host_module
WORKER = "rl_safe_workers.adapters.nemo_rl.worker"


@pytest.fixture
def worker_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Our module, with the small host where NeMo RL's is imported from."""
    utils: Any = ModuleType("nemo_rl.models.policy.utils")
    utils.get_runtime_env_for_policy_worker = lambda name: {}
    host: Any = ModuleType(HOST)
    host.MegatronPolicyWorkerImpl = HostImpl
    parts = HOST.split(".")
    for name in [".".join(parts[:length]) for length in range(1, len(parts))]:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, utils.__name__, utils)
    monkeypatch.setitem(sys.modules, HOST, host)
    monkeypatch.delitem(sys.modules, WORKER, raising=False)
    yield importlib.import_module(WORKER)
    sys.modules.pop(WORKER, None)


def test_the_worker_is_an_actor_of_ours_over_the_hosts(worker_module) -> None:
    impl = worker_module.SafeMegatronPolicyWorkerImpl
    assert impl.__mro__.index(SafePolicyMixin) < impl.__mro__.index(HostImpl)
    actor = worker_module.SafeMegatronPolicyWorker
    assert hasattr(actor, "remote")
    # NeMo RL's builder asks the actor's class for its options (worker_groups.py:184).
    assert actor.configure_worker(num_gpus=1)[0] == {"num_gpus": 0}


def test_over_the_hosts_own_class_ours_come_first_and_pass_on_what_it_takes() -> None:
    """Runs where NeMo RL imports, as in its image: it needs Transformer Engine, which needs CUDA."""
    try:
        host = importlib.import_module(HOST).MegatronPolicyWorkerImpl
    except (ImportError, AssertionError) as error:  # the latter for versions that it does not know
        pytest.skip(f"NeMo RL's worker does not import here: {error}")
    impl = importlib.import_module(WORKER).SafeMegatronPolicyWorkerImpl
    assert impl.__mro__[1:3] == (SafePolicyMixin, host)
    assert impl.configure_worker is host.configure_worker
    for expected in NAMES:
        owner, _, method = expected.name.rpartition(".")
        if owner in ("MegatronPolicyWorkerImpl", "AbstractPolicyWorker", "MegatronGenerationRefitMixin") and not (
            expected.optional and not hasattr(host, method)
        ):
            assert method in vars(SafePolicyMixin)
            given = inspect.signature(getattr(host, method)).parameters
            # Some are behind decorators of NeMo RL's, which show nothing of them.
            if all(one.kind is not one.VAR_POSITIONAL for one in given.values()):
                names = iter(given)
                assert all(name in names for name in expected.parameters), method
