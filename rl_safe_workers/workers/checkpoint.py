"""The checkpoint mixin: saves and loads on the training world alone."""

from __future__ import annotations

import copy
import json
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rl_safe_workers.checkpoint.loader import read_content_metadata
from rl_safe_workers.checkpoint.manifest import SHARDS, Manifest, check_fingerprint, read_manifest, step_dir
from rl_safe_workers.checkpoint.publish import pending_path
from rl_safe_workers.checkpoint.retention import commit, prune, start_save
from rl_safe_workers.checkpoint.state import CONTENT_METADATA, restore_state, sharded_state, state_digest
from rl_safe_workers.checkpoint.stock import save_with_megatron
from rl_safe_workers.checkpoint.writer import WrittenFile, file_records
from rl_safe_workers.errors import CheckpointError
from rl_safe_workers.lifecycle import SAVE_ENDS_BEFORE, Phase
from rl_safe_workers.versions import WRITERS, version_of
from rl_safe_workers.workers.shards import ShardsMixin

logger = logging.getLogger(__name__)


class CheckpointMixin(ShardsMixin):
    """Writes ``global_step_N`` directories that exist only when complete; no rollout rank takes part.

    A save issues no collective at all: ranks agree over the run's store, so that none can be left hanging.
    """

    chunks: list[Any]
    optimizer: Any

    def check_phase(self, phase: Phase) -> None:
        """Finishes a save in the background before a phase that it must not reach into; else moves it on.

        Raises:
            CheckpointError: On every rank, before one of those phases, if the save has failed. Other phases do not
                raise it: ranks learn of it at different times, and one that raised would leave the others waiting.
        """
        super().check_phase(phase)
        if self._saver is not None and self._saver.in_flight:
            if phase in SAVE_ENDS_BEFORE:
                self.finalize_checkpoint()
            else:
                self._saver.advance()

    def give_up(self, reason: str) -> None:
        """Gives up a save in the background, so that the others need not wait for this rank."""
        super().give_up(reason)
        if self._saver is not None:
            self._saver.abandon(reason)

    def save_checkpoint(
        self,
        root: str | Path,
        *,
        step: int,
        fingerprint: str,
        layout: Mapping[str, int],
        driver_state: dict[str, Any],
        background: bool | None = None,
    ) -> Path:
        """Saves model, optimizer, random state and the driver's state.

        Collective over: the training world, in phase ``save``, through the store: no process group takes part unless
        one of Megatron's flags is on. With ``background`` it returns once this rank's state is copied to host memory;
        `poll_checkpoint` and `finalize_checkpoint` see to the rest.

        Args:
            root: Directory of all checkpoints, on storage that every trainer sees.
            step: Steps completed.
            fingerprint: Digest of the model's architecture.
            layout: Parallel sizes, for the record: a load may have others.
            driver_state: JSON-friendly state of the driver: the data position.
            background: Whether to write while training goes on; None: as ``rl_safe.checkpoint.async_save`` says.

        Returns:
            The checkpoint's path, which exists once the save is committed.

        Raises:
            CheckpointError: On every rank, if one cannot write, there is no room, or the ranks' tensors do not match;
                the previous checkpoint stays as it was.
            PhaseTimeoutError: If a trainer does not arrive, or has not written, in time; names it.
        """
        root = Path(root).absolute()
        config = self.rl_safe.checkpoint
        background = config.async_save if background is None else background
        final = step_dir(root, step)
        pending = pending_path(final)
        # A save in the background has its manifest written when the caller's own may have gone on.
        driver_state = copy.deepcopy(driver_state)
        with self.phase(Phase.SAVE):
            if self.training_rank == 0:
                logger.info(
                    "save of step %d on the %d training ranks alone: fully_parallel_save=%s, "
                    "validate_access_integrity=%s",
                    step, self.training_size, config.fully_parallel_save, config.validate_access_integrity,
                )  # fmt: skip
            saver = self._open_saver()
            try:
                self._check_default_group()
                _check_driver_state(driver_state)
                state = sharded_state(
                    self.chunks, self.optimizer,
                    training_rank=self.training_rank, size=self.training_size, is_loading=False,
                )  # fmt: skip
                digest = state_digest(self.chunks, self.optimizer) if config.digest else ""
            except Exception as error:
                saver.fail(error, self.remaining())

            def commit_it(files: Mapping[str, WrittenFile], digests: Sequence[str]) -> str:
                manifest = _manifest(pending, files, digests, step, fingerprint, layout, driver_state)
                path = commit(pending, manifest, durable=files)
                removed = prune(root, keep_last=config.keep_last, but=path)
                logger.info("saved %s%s", path, f", removed {', '.join(p.name for p in removed)}" if removed else "")
                return str(path)

            if config.fully_parallel_save or config.validate_access_integrity:
                saver.save_with(
                    lambda: save_with_megatron(state, pending / SHARDS, config, CONTENT_METADATA),
                    prepare=lambda: start_save(root, step), commit=commit_it, timeout=self.remaining(), note=digest,
                )  # fmt: skip
                return final
            saver.begin(
                state,
                pending / SHARDS,
                content_metadata=CONTENT_METADATA,
                prepare=lambda: start_save(root, step),
                commit=commit_it,
                timeout=self.remaining(),
                background=background,
                note=digest,
            )
            if not background:
                saver.finish(self.remaining())
            return final

    def _check_default_group(self) -> None:
        """Refuses a default group that is not the training world: Megatron describes what a rank holds by its ranks."""
        if (dist.get_rank(), dist.get_world_size()) != (self.training_rank, self.training_size):
            raise CheckpointError(
                f"training rank {self.training_rank} of {self.training_size} is rank {dist.get_rank()} of "
                f"{dist.get_world_size()} in the default group: leave it what init_world or carve_world made it"
            )

    def poll_checkpoint(self) -> bool:
        """Moves a save in the background on, without waiting. Not collective: ranks may call it as often as they like.

        Every phase does it by itself when it is entered. Ranks learn at different times that a save has failed, so the
        failure is logged here and raised by `finalize_checkpoint`, or by a phase that calls it, on every rank.

        Returns:
            Whether the save is still in progress.

        Raises:
            CommunicatorError: If the run's store is gone.
        """
        return self._saver is not None and self._saver.poll()

    def finalize_checkpoint(self) -> Path | None:
        """Waits for a save in the background to be committed. Collective over: the training world, through the store.

        The phases offload, save, load, convert and teardown do it by themselves. The deadline is that of phase
        ``save``, from now on.

        Returns:
            The checkpoint's path; None if no save is in progress.

        Raises:
            CheckpointError: On every rank, if the save has failed.
            PhaseTimeoutError: Naming the ranks that have not written in time.
        """
        path = None if self._saver is None else self._saver.finish(self.timeout(Phase.SAVE))
        return None if path is None else Path(path)

    def load_checkpoint(
        self, path: str | Path, *, fingerprint: str, layout: Mapping[str, int], strict: bool = True
    ) -> Manifest:
        """Loads model, optimizer and random state, saved under any layout.

        Collective over: the training world, in phase ``load``, through the store. Under another layout than it was
        saved with, the random state stays what the seed made it.

        Args:
            path: A ``global_step_N`` directory.
            fingerprint: Digest of this model's architecture.
            layout: This run's parallel sizes.
            strict: Whether keys of the checkpoint that no rank asks for are an error.

        Returns:
            The checkpoint's manifest, with the driver's state.

        Raises:
            CheckpointError: If the checkpoint is not complete or damaged, or this rank's state does not have the
                digest that was saved.
            CheckpointMismatchError: If it belongs to another model, with the keys that are missing or unexpected.
            PhaseTimeoutError: If a trainer does not arrive in time; names it.
        """
        path = Path(path).absolute()
        found: list[Manifest] = []

        def describe() -> dict[str, Any]:
            manifest = read_manifest(path)
            check_fingerprint(manifest, path=path, fingerprint=fingerprint)
            found.append(manifest)
            return sharded_state(
                self.chunks, self.optimizer, training_rank=self.training_rank, size=self.training_size,
                is_loading=True, metadata=read_content_metadata(path / SHARDS), rng=manifest.layout == dict(layout),
            )  # fmt: skip

        def restore(loaded: dict[str, Any]) -> None:
            restore_state(self.chunks, self.optimizer, loaded)
            if found[0].layout == dict(layout):
                self._check_digest(found[0], path)

        with self.phase(Phase.LOAD):
            self._open_loader().load(describe, path / SHARDS, timeout=self.remaining(), restore=restore, strict=strict)
        return found[0]

    def _check_digest(self, manifest: Manifest, path: Path) -> None:
        saved = manifest.digests.get(str(self.training_rank))
        if saved is not None and (loaded := state_digest(self.chunks, self.optimizer)) != saved:
            raise CheckpointError(
                f"{path}: the state loaded on training rank {self.training_rank} is not what was saved "
                f"(digest {loaded[:12]}, saved {saved[:12]})"
            )


def _check_driver_state(driver_state: Mapping[str, Any]) -> None:
    try:
        json.dumps(driver_state, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"driver_state cannot be saved as JSON: {error}; give numbers, texts and lists"
        ) from error


def _manifest(
    pending: Path,
    files: Mapping[str, WrittenFile],
    digests: Sequence[str],
    step: int,
    fingerprint: str,
    layout: Mapping[str, int],
    driver_state: dict[str, Any],
) -> Manifest:
    """Describes a finished directory: files of other ranks as they reported them, the few others as they are read."""
    return Manifest(
        step=step,
        model_fingerprint=fingerprint,
        layout=dict(layout),
        saved_at=time.time(),
        versions={name: version_of(name) for name in WRITERS},
        files=file_records(pending, files),
        driver_state=driver_state,
        digests={str(rank): digest for rank, digest in enumerate(digests) if digest},
    )
