"""Every name of ms-swift's and mcore-bridge's that the adapter relies on, with the parameters that it relies on.

Nothing of them is imported. `check_swift` compares it with what is installed before anything is replaced, and
``tests/swift/test_swift_contract.py`` with the supported versions.
"""

from __future__ import annotations

from pathlib import Path

from rl_safe_workers.adapters.host_contract import HostName, HostText, lacking
from rl_safe_workers.errors import ConfigError

SINCE, UNTIL = "4.3.0", "4.6.0"
"""The first version of ms-swift that fits, and the newest that was read."""
_UTILS = "swift/megatron/utils/megatron_lm_utils.py"
_BASE = "swift/megatron/trainers/base.py"
_SFT = "swift/megatron/pipelines/train/sft.py"
_EXPORT = "swift/megatron/pipelines/export/export.py"
_ARGS = "swift/megatron/arguments/megatron_args.py"
_FLOW = "swift/megatron/callbacks/default_flow.py"
_CALLBACK = "swift/megatron/callbacks/base.py"
_TRAINER = "BaseMegatronTrainer"

NAMES: tuple[HostName, ...] = (
    HostName(
        file=_ARGS,
        name="MegatronArguments._init_distributed",
        parameters=("self",),
        why="creates the groups once every argument is known",
    ),
    HostName(file=_UTILS, name="_initialize_mpu", parameters=("args",), why="replaced: limits, deadlines, bootstrap"),
    HostName(
        file=_UTILS, name="save_mcore_checkpoint", parameters=("args", "models"), why="every save goes through it"
    ),
    HostName(
        file=_UTILS,
        name="maybe_finalize_async_save",
        parameters=("args", "blocking", "terminate"),
        why="asks our queue in every step",
    ),
    HostName(file=_BASE, name=f"{_TRAINER}.__init__", parameters=("self", "args", "template"), why="phase convert"),
    HostName(
        file=_BASE,
        name=f"{_TRAINER}.train",
        parameters=("self", "train_dataset", "val_dataset"),
        why="replaced: a failure is told at once",
    ),
    HostName(file=_BASE, name=f"{_TRAINER}.save_checkpoint", parameters=("self",), why="phase save"),
    HostName(
        file=_BASE,
        name=f"{_TRAINER}.run_train_step",
        parameters=("self", "train_data_iterator", "val_data_iterator"),
        why="calls our callback around a step",
    ),
    HostName(file=_BASE, name=f"{_TRAINER}.evaluate", parameters=("self", "val_data_iterator"), why="likewise"),
    HostName(file=_FLOW, name="DefaultFlowCallback", parameters=(), why="derived from: phases train and logprob"),
    HostName(file=_CALLBACK, name="MegatronCallback.on_step_begin", parameters=("self",), why="overridden"),
    HostName(file=_CALLBACK, name="MegatronCallback.on_step_end", parameters=("self",), why="overridden"),
    HostName(file=_CALLBACK, name="MegatronCallback.on_eval_begin", parameters=("self",), why="overridden"),
    HostName(file=_CALLBACK, name="MegatronCallback.on_eval_end", parameters=("self",), why="overridden"),
    HostName(file=_SFT, name="MegatronSft.run", parameters=("self",), why="replaced: the exit"),
    HostName(file=_EXPORT, name="MegatronExport.run", parameters=("self",), why="replaced: phase convert and the exit"),
)

TEXTS: tuple[HostText, ...] = (
    HostText(
        file="swift/arguments/base_args/base_args.py",
        within="BaseArguments.__post_init__",
        text="self._import_external_plugins()",
        why="the plugin comes before the groups",
    ),
    HostText(
        file="swift/utils/torch_utils.py",
        within="init_process_group",
        text="dist.init_process_group(backend=backend",
        why="replaced: looked up in torch.distributed",
    ),
    HostText(
        file=_UTILS,
        within="_initialize_mpu",
        text="mpu.initialize_model_parallel(",
        why="replaced: looked up in megatron-core's module",
    ),
    HostText(file=_UTILS, within="initialize_megatron", text="_initialize_mpu(args)", why="looked up in the module"),
    HostText(
        file=_UTILS,
        within="save_mcore_checkpoint",
        text="dist_checkpointing.save(state_dict, checkpoint_dir",
        why="replaced: looked up in megatron-core's package",
    ),
    HostText(
        file=_UTILS,
        within="save_mcore_checkpoint",
        text="from megatron.core.msc_utils import open_file",
        why="replaced: the tracker comes last",
    ),
    HostText(
        file=_UTILS,
        within="save_mcore_checkpoint",
        text="torch.distributed.barrier()",
        why="replaced: looked up in torch.distributed",
    ),
    HostText(
        file=_UTILS,
        within="maybe_finalize_async_save",
        text="_async_calls_queue.maybe_finalize_async_calls(",
        why="replaced: the queue",
    ),
    HostText(
        file=_UTILS,
        within="init_persistent_async_worker",
        text="AsyncCallsQueue(persistent=True)",
        why="replaced: the queue",
    ),
    HostText(
        file="swift/megatron/callbacks/mapping.py",
        within="",
        text="'default_flow': DefaultFlowCallback",
        why="ms-swift's registry of callbacks",
    ),
    HostText(
        file=_ARGS,
        within="MegatronArguments.__post_init__",
        text="self.callbacks += ['print', 'default_flow'",
        why="every job has that callback",
    ),
    HostText(
        file="swift/megatron/init.py",
        within="_patch__batched_p2p_ops",
        text="kwargs['group'] = None",
        why="stages send over the default group",
    ),
    HostText(file=_SFT, within="MegatronSft.run", text="dist.destroy_process_group()", why="left to our teardown"),
)

BRIDGE_NAMES: tuple[HostName, ...] = (
    HostName(
        file="mcore_bridge/bridge/gpt_bridge.py",
        name="GPTBridge.__init__",
        parameters=("self", "config"),
        why="as below",
    ),
)

BRIDGE_TEXTS: tuple[HostText, ...] = (
    HostText(
        file="mcore_bridge/bridge/gpt_bridge.py",
        within="GPTBridge.__init__",
        text="if EP_PP_GROUP is None",
        why="finds the groups that we have created",
    ),
    HostText(
        file="mcore_bridge/bridge/gpt_bridge.py",
        within="GPTBridge.__init__",
        text="order='tp-cp-ep-dp-pp'",
        why="the ranks of those groups",
    ),
)


def check_swift(swift: Path, bridge: Path) -> None:
    """Refuses an ms-swift or mcore-bridge that this adapter does not fit.

    Args:
        swift: The folder that holds the package ``swift``.
        bridge: The folder that holds ``mcore_bridge``.

    Raises:
        ConfigError: Naming what it lacks.
    """
    for host, root, names, texts in (
        ("ms-swift", swift, NAMES, TEXTS),
        ("mcore-bridge", bridge, BRIDGE_NAMES, BRIDGE_TEXTS),
    ):
        if lack := lacking(root, names, texts):
            raise ConfigError(
                f"the {host} in {root} lacks {lack}, which rl_safe_workers needs: use ms-swift {SINCE} to {UNTIL} "
                "(docs/swift.md), or leave our plugin out"
            )
