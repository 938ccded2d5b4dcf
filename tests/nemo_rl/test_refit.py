"""The training ranks' side of a refit: a phase with a deadline, which names the rank or the rollout that is late."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from rl_safe_workers.adapters.job_inquiry import ROLLOUT
from rl_safe_workers.adapters.nemo_rl import policy_process, refit_places
from rl_safe_workers.adapters.nemo_rl.nemo_rl_settings import VARIABLE, NemoRlSettings
from rl_safe_workers.adapters.nemo_rl.policy_process import PolicyProcess
from rl_safe_workers.adapters.nemo_rl.refit_places import awaited_rollout
from rl_safe_workers.config import SeededModelConfig
from rl_safe_workers.errors import LifecycleError
from rl_safe_workers.frames import Frame
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.models import gathering
from rl_safe_workers.models.seeded import create_seeded_model
from rl_safe_workers.ports import port_to_listen_on
from tests.distributed.ranks import Outcome, run_ranks, values
from tests.nemo_rl import sending
from tests.nemo_rl.host import SafeWorker, annotations, set_environment
from tests.nemo_rl.test_life import config_of
from tests.slow_digest import slow_digest

SIZE, VICTIM = 2, 1
TIMEOUT_S = 4.0
ALLOWED_S = TIMEOUT_S + 4.0
SENDS = ("broadcast_weights_for_collective", "stream_weights_via_ipc_zmq")


@pytest.fixture(scope="module")
def tiny_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "moe"
    create_seeded_model(path, SeededModelConfig())
    return path


@pytest.fixture
def port() -> int:
    return port_to_listen_on("127.0.0.1")


def start(rank: int, port: int, config: dict[str, Any]) -> SafeWorker:
    set_environment(rank, SIZE, port)
    timeouts = {"world": 40, "bootstrap": 40, "convert": 60, "sync": TIMEOUT_S}
    os.environ[VARIABLE] = json.dumps({"timeouts": timeouts})
    refit_places.ROLLOUT_PLACES[sending.PLACE] = ROLLOUT
    refit_places.BETWEEN_TRAINERS = (gathering.__name__.replace(".", "/"),)
    return SafeWorker(config, worker_sharding_annotations=annotations(SIZE))


def _refit(rank: int, port: int, config: dict[str, Any], send: str) -> Any:
    worker = start(rank, port, config)
    gathered: list[Any] = []
    policy_process.complete_param_gathers = gathered.extend
    worker.rl_safe_prove()
    started_s = time.monotonic()
    try:
        value = getattr(worker, send)()
    except Exception as error:
        took_s = time.monotonic() - started_s
        # As an actor, this process stays: the connections of others to it do not break.
        time.sleep(max(0.0, ALLOWED_S - took_s))
        raise RuntimeError(f"{took_s:.1f} s, {type(error).__name__}: {error}") from error
    events = [event for event in worker.safe.trainer.lifecycle.drain_events() if event.phase is Phase.SYNC]
    sent, held = worker.rl_safe_sent().digests, dict(worker.policy.export_hf_weights())
    assert sent == {name: slow_digest(weight) for name, weight in held.items()}
    worker.shutdown()
    return value, [event.ok for event in events], sent, [model is worker.model for model in gathered]


def _texts(outcomes: list[Outcome]) -> list[str]:
    """Returns the errors, each of which has to come in time."""
    texts = [str(outcome.error) for outcome in outcomes]
    assert all(outcome.finished for outcome in outcomes)
    assert all(float(text.split()[0]) < ALLOWED_S for text in texts), texts
    return texts


@pytest.mark.parametrize("send", ["prepare_refit_info", *SENDS])
def test_a_refit_is_a_phase_that_does_as_the_hosts(send, tiny_moe, tmp_path, port) -> None:
    found = values(run_ranks(_refit, SIZE, port, config_of(tiny_moe, tmp_path), send))
    for value, phases, _, gathered in found:
        assert phases == [True]
        # Without the gathers that DDP has put off, weights that are sent would be old ones in part.
        assert gathered == [send in SENDS]
        assert (len(value) if send == "prepare_refit_info" else value) > 10
    assert found[0][2] == found[1][2], "every rank sends the same weights"


@pytest.mark.parametrize("send", SENDS)
def test_a_rollout_that_does_not_answer_is_blamed_on_every_rank(send, tiny_moe, tmp_path, port) -> None:
    config = config_of(tiny_moe, tmp_path, refit={VICTIM: "silent"})
    late = re.compile(
        r"phase sync: the rollout, awaited by training rank 1, did not finish within 4\.\d s "
        r"\(the rank waits in tests/nemo_rl/sending\.py:\d+ \(misbehave\)\); to wait longer raise "
        r"rl_safe\.timeouts\.sync"
    )
    for text in _texts(run_ranks(_refit, SIZE, port, config, send)):
        assert late.search(text)


def test_a_rollout_that_is_gone_is_the_error_of_its_rank_at_once_and_of_the_others_in_time(
    tiny_moe, tmp_path, port
) -> None:
    config = config_of(tiny_moe, tmp_path, refit={VICTIM: "fails"})
    texts = _texts(run_ranks(_refit, SIZE, port, config, SENDS[0]))
    assert all("the engine has closed the connection" in text for text in texts)
    assert "training rank 1" in texts[0]
    assert float(texts[VICTIM].split()[0]) < TIMEOUT_S


def test_a_training_rank_that_is_stopped_in_a_refit_is_named(tiny_moe, tmp_path, port) -> None:
    config = config_of(tiny_moe, tmp_path, refit={VICTIM: "stops"})
    outcomes = run_ranks(_refit, SIZE, port, config, SENDS[0], timeout_s=30)
    (text,) = _texts([outcome for outcome in outcomes if outcome.rank != VICTIM])
    assert "phase sync: rank 1 of training world did not arrive within" in text
    assert "rl_safe.timeouts.sync" in text


def test_a_refit_before_there_is_a_world_is_refused() -> None:
    with pytest.raises(LifecycleError, match="no training world yet"):
        PolicyProcess(NemoRlSettings()).sync(lambda: pytest.fail("sent"))


def _frames(*files: str) -> list[Frame]:
    return [Frame(file=file, line=1, function="f") for file in files]


PACKED, ZMQ = "nemo_rl/utils/packed_tensor.py", "nemo_rl/models/policy/utils.py"


@pytest.mark.parametrize(
    ("innermost_first", "expected"),
    [
        (["torch/cuda/streams.py", PACKED, "nemo_rl/models/policy/workers/megatron_policy_worker.py"], ROLLOUT),
        (["zmq/sugar/socket.py", ZMQ], "the rollout engine on its GPU"),
        (["torch/distributed/distributed_c10d.py", "megatron/bridge/models/conversion/param_mapping.py", PACKED], None),
        (
            ["/opt/x/megatron/core/resharding/execution.py", "nemo_rl/models/generation/megatron/megatron_worker.py"],
            ROLLOUT,
        ),
        (["nemo_rl/models/megatron/pipeline_parallel.py", ZMQ], None),
        (["threading.py"], None),
        ([], None),
    ],
)
def test_the_innermost_frame_of_the_host_tells_whom_a_rank_waits_for(innermost_first, expected) -> None:
    assert awaited_rollout(_frames(*innermost_first)) == expected
