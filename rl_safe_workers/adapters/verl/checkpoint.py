"""verl's checkpoint manager with our saves and loads. It keeps verl's layout and files, but not verl's collectives.

    global_step_10/actor/
      ckpt_contents.json            verl's manifest, written last
      transformer_config.json
      model/huggingface/            HF weights, by verl's bridge
      model/dist_ckpt/              shards, with use_dist_checkpointing
      optimizer/dist_ckpt/          shards and the scheduler
      extra/dist_ckpt/              random states

The contents are described in verl's own format. So verl can read our checkpoints, and we can read verl's.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from verl.utils.checkpoint.megatron_checkpoint_manager import MegatronCheckpointManager

from rl_safe_workers.adapters.shards import make_durable, replicas_in_megatron
from rl_safe_workers.adapters.verl.pending_saves import PendingSave
from rl_safe_workers.adapters.verl.process import TrainerProcess
from rl_safe_workers.checkpoint.folders.durable import fsync
from rl_safe_workers.checkpoint.folders.manifest import SHARDS
from rl_safe_workers.checkpoint.folders.shard_folder import check_no_links, clear_shards
from rl_safe_workers.checkpoint.load.loader import Loader, read_content_metadata
from rl_safe_workers.checkpoint.save.saver import Saver
from rl_safe_workers.checkpoint.state.optimizer_state import FULLY_RESHARDABLE, is_in_place
from rl_safe_workers.checkpoint.state.state import restore_state, sharded_state
from rl_safe_workers.compat.param_gathers import complete_param_gathers
from rl_safe_workers.errors import CheckpointError
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.setting_names import timeout_setting

logger = logging.getLogger(__name__)

MANIFEST = "ckpt_contents.json"
TREES = ("model", "optimizer", "extra")


class SafeCheckpointManager(MegatronCheckpointManager):
    """Overrides how verl's manager describes, writes and reads shards. verl's ``save_checkpoint`` still calls it."""

    process: TrainerProcess
    name: str
    checkpoint_config: Any
    _savers: dict[str, Saver]
    _step_folder: Path
    """verl's folder for the last saved step."""
    _ends_at_once = False
    """True if a save must be complete when its call returns, because verl's rank 0 then uploads it or names it."""

    @classmethod
    def take_over(cls, manager: MegatronCheckpointManager, process: TrainerProcess, name: str) -> SafeCheckpointManager:
        """Returns our manager with the state of verl's, which verl constructs by name (transformer_impl.py:627)."""
        ours: SafeCheckpointManager = cls.__new__(cls)
        ours.__dict__.update(manager.__dict__)
        ours.process, ours.name, ours._savers = process, name, {}
        return ours

    @property
    def _in_background(self) -> bool:
        """True if saves run in the background while verl trains.

        False if verl's driver names the step right after the actor's save. Also False if there is an upload: it would
        have no deadline, and the other ranks would wait for rank 0 in the next phase.
        """
        return bool(self.checkpoint_config.async_save) and self.process.tracker.is_ours and not self._ends_at_once

    def _build_optimizer_state_dict(
        self, model_sharded_state_dict: dict[str, Any], metadata: dict[str, Any], is_loading: bool = False
    ) -> dict[str, Any]:
        """Returns the state as verl does, but without a barrier, and without a gather for ``fully_reshardable``."""
        if self._is_in_place(metadata):
            state = {"optimizer": self._describe(metadata, is_loading=is_loading)["optimizer"]}
        else:
            state = {
                "optimizer": self.optimizer.sharded_state_dict(
                    model_sharded_state_dict, is_loading=is_loading, metadata=metadata
                )
            }
        if self.lr_scheduler is not None:
            state["lr_scheduler"] = self.lr_scheduler.state_dict()
        return state

    def _is_in_place(self, metadata: dict[str, Any]) -> bool:
        is_reshardable = metadata.get("distrib_optim_sharding_type") == FULLY_RESHARDABLE
        return is_reshardable and self.peft_cls is None and is_in_place(self.optimizer)

    def _build_extra_state_dict(self) -> dict[str, Any]:
        return {"rng_state": self.get_rng_state()}

    def _describe(self, metadata: dict[str, Any], *, is_loading: bool) -> dict[str, Any]:
        return sharded_state(
            self.model,
            self.optimizer,
            training_rank=self.process.trainer.training_rank,
            size=self.process.trainer.training_size,
            is_loading=is_loading,
            metadata=metadata,
            rng=False,
        )

    def save_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, global_step: int = 0, max_ckpt_to_keep: int | None = None
    ) -> None:
        """Saves as verl does. Collective over: the training world, within ``timeouts.save``.

        Shards need no collective. HF weights need the bridge's collectives, on tensor, pipeline and expert groups.
        verl has a barrier before these collectives (megatron_checkpoint_manager.py:1276).

        Raises:
            CheckpointError: On every rank, if a rank cannot write.
            PhaseTimeoutError: If a rank does not arrive, write or upload in time; names it.
        """
        self._step_folder = _step_folder(local_path)
        self._notice_upload(hdfs_path)
        # verl's trainer for supervised fine-tuning names a step right after saving it.
        self._ends_at_once = hdfs_path is not None or self._step_folder == Path(local_path).absolute()
        self.process.saves.finish_before(self.name, self._step_folder)
        self.process.tracker.begin(self.name, self._step_folder, global_step)
        started_s = time.monotonic()
        with self.process.trainer.phase(Phase.SAVE), self.process.failing_together(Phase.SAVE):
            complete_param_gathers(self.model)
            self._uncommit(local_path)
            super().save_checkpoint(local_path, hdfs_path, global_step, max_ckpt_to_keep)
        self.process.save_seconds += time.monotonic() - started_s

    def _notice_upload(self, hdfs_path: str | None) -> None:
        if hdfs_path is not None and self._in_background and self.rank == 0:
            logger.warning(
                "%s: saves are uploaded to %s, so they do not go on in the background, whatever async_save says; "
                "writing and upload together end within %s=%.0f s",
                self.name,
                hdfs_path,
                timeout_setting(Phase.SAVE),
                self.process.trainer.timeout(Phase.SAVE).total_seconds(),
            )

    def _uncommit(self, local_path: str) -> None:
        """Removes the manifest of an older save of this step, so that a partial new save does not look complete."""
        manifest = Path(local_path).absolute() / MANIFEST
        if self.rank == 0:
            check_no_links(manifest.parent, below=self._step_folder.parent)
        if self.rank == 0 and manifest.exists():
            manifest.unlink()
            fsync(manifest.parent)

    def _save_dist_checkpoint(self, dist_checkpoint_path: str, state_dict: dict[str, Any]) -> Saver | None:
        directory = Path(dist_checkpoint_path).absolute()
        background = self._in_background
        saver = self._saver(directory.parent.name)
        saver.begin(
            state_dict,
            directory,
            content_metadata=self._build_sharded_state_dict_metadata(),
            prepare=functools.partial(clear_shards, directory, below=self._step_folder.parent),
            commit=functools.partial(make_durable, directory, parents=2),
            timeout=self.process.trainer.remaining(),
            background=background,
        )
        if background:
            return saver
        saver.finish(self.process.trainer.remaining())
        return None

    def _saver(self, tree: str) -> Saver:
        if tree not in self._savers:
            self._savers[tree] = Saver(
                self.process.trainer.control.scope(f"{self.name}/{tree}"),
                replicas=replicas_in_megatron(optimizer=not self.use_distributed_optimizer),
            )
        return self._savers[tree]

    def _dispatch_finalize(self, async_requests: list[Saver], finalize_save_fn: Callable[[], None]) -> None:
        if async_requests:
            self.process.trainer.together(Phase.SAVE, lambda: None)  # HF weights are written by now, on every rank
            self.process.saves.follow(PendingSave(self.name, self._step_folder, async_requests, finalize_save_fn))
            return
        self.process.trainer.together(Phase.SAVE, finalize_save_fn)
        if self.rank != 0:
            finalize_save_fn()

    def _finalize_save(self, **arguments: Any) -> None:
        """Finalises as verl does, but writes no tracker file: other engines may not have saved this step yet."""
        with self._as_synchronous():
            super()._finalize_save(**arguments)

    @contextmanager
    def _as_synchronous(self) -> Iterator[None]:
        config = self.checkpoint_config
        self.checkpoint_config = replace(config, async_save=False)
        try:
            yield
        finally:
            self.checkpoint_config = config

    def register_checkpoint(self, new_path: str, max_ckpt_to_keep: int | None) -> None:
        """Registers a complete save as verl does, which removes older saves.

        If the workers name the steps, this happens once the step has been named.
        """
        register = functools.partial(super().register_checkpoint, new_path, max_ckpt_to_keep)
        if self.process.tracker.is_ours:
            self.process.tracker.saved(self.name, _step_folder(new_path), register)
        else:
            register()

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """Loads a checkpoint of verl's or ours. Collective over: the training world, within ``timeouts.load``.

        Raises:
            CheckpointError: On every rank, if a rank cannot read its part, or if there is no complete checkpoint.
            CheckpointMismatchError: On every rank, if keys or shapes differ; names them.
        """
        with self.process.trainer.phase(Phase.LOAD):
            if self.use_megatron_fsdp or self.peft_cls is not None:
                super().load_checkpoint(local_path, hdfs_path, del_local_after_load)
                return
            self._load(local_path)

    def _load(self, local_path: str) -> None:
        # verl's functions for these paths would create the directories.
        model, optimizer, extra = (Path(local_path).absolute() / tree / SHARDS for tree in TREES)
        self._check_complete(local_path)
        metadata = self._metadata_of([model, optimizer, extra])
        if self.should_load_dist_ckpt_model:
            self._read("model", model, lambda: self._build_model_sharded_state_dict(metadata), self._put_model)
        elif self.should_load_hf_model:
            self._load_model_as_hf_via_bridge(str(model.parent / "huggingface"))
        if self.should_load_optimizer:
            self._read(
                "optimizer",
                optimizer,
                lambda: {"optimizer": self._describe(dict(metadata), is_loading=True)["optimizer"]},
                self._put_optimizer,
            )
        if self.should_load_extra:
            self._read("extra", extra, self._build_extra_state_dict, self._put_extra)

    def _check_complete(self, local_path: str) -> None:
        def check() -> None:
            if not Path(local_path).is_dir():
                raise CheckpointError(f"there is no checkpoint {local_path}")
            self._raise_for_old_layout(local_path)
            if not (Path(local_path) / MANIFEST).is_file():
                raise CheckpointError(f"{local_path} is not a complete checkpoint: it has no {MANIFEST}")

        self.process.trainer.together(Phase.LOAD, check)

    def _metadata_of(self, trees: Sequence[Path]) -> dict[str, Any]:
        for tree in trees:
            if (tree / "metadata.json").is_file():
                found = read_content_metadata(tree)
                if found is None:
                    raise CheckpointError(
                        f"{tree} does not say in which format it is: it is older than megatron-core 0.14"
                    )
                return found
        return {}

    def _read(
        self,
        tree: str,
        directory: Path,
        describe: Callable[[], dict[str, Any]],
        restore: Callable[[dict[str, Any]], None],
    ) -> None:
        loader = Loader(self.process.trainer.control.scope(f"{self.name}/{tree}"))
        loader.load(describe, directory, timeout=self.process.trainer.remaining(), restore=restore)

    def _put_model(self, loaded: dict[str, Any]) -> None:
        for index, chunk in enumerate(self.model):
            chunk.load_state_dict(loaded["model" if len(self.model) == 1 else f"model{index}"], strict=True)

    def _put_optimizer(self, loaded: dict[str, Any]) -> None:
        restore_state(self.model, self.optimizer, {"optimizer": loaded["optimizer"]})
        if self.use_checkpoint_opt_param_scheduler and self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(loaded["lr_scheduler"])

    def _put_extra(self, loaded: dict[str, Any]) -> None:
        self.load_rng_states(loaded["rng_state"])


def _step_folder(local_path: str) -> Path:
    """Returns verl's folder of a step. Each role has a folder in it. A single model has none (sft_trainer.py:89)."""
    path = Path(local_path).absolute()
    return path if path.name.startswith("global_step_") else path.parent
