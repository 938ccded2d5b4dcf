"""Converts HF weights to Megatron's shards and back, on the training world alone."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import torch

from rl_safe_workers.checkpoint.folders.conversion_folder import (
    HF_FILES,
    OURS,
    ConvertedModel,
    find_conversion,
    lock_path,
    publish_conversion,
)
from rl_safe_workers.checkpoint.folders.lock import exclusive
from rl_safe_workers.checkpoint.folders.manifest import SHARDS, model_fingerprint
from rl_safe_workers.checkpoint.folders.publish import (
    check_export,
    make_parent,
    pending_path,
    removed_on_failure,
    start_pending,
)
from rl_safe_workers.checkpoint.save.hf_writer import MAX_SHARD_BYTES, copy_hf_files, write_hf_directory
from rl_safe_workers.checkpoint.save.saver import CheckpointSaves
from rl_safe_workers.checkpoint.save.writer import WrittenFile, file_records
from rl_safe_workers.checkpoint.state.model_state import model_state
from rl_safe_workers.checkpoint.state.state import CONTENT_METADATA
from rl_safe_workers.compat.param_gathers import complete_param_gathers
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.models.hf_directory import check_mtp_source
from rl_safe_workers.models.hf_reader import HfReader, mtp_weights
from rl_safe_workers.setting_names import timeout_setting
from rl_safe_workers.topology.layout import ParallelLayout
from rl_safe_workers.worlds.training_rank import MegatronHost, Part, TrainingRank

logger = logging.getLogger(__name__)

SLACK_S = 2.0
"""Seconds before the phase's end at which rank 0 stops waiting for another run, so that all ranks learn the reason."""


class ConvertHost(MegatronHost, Protocol):
    """The interface that a conversion needs of the host class, in addition to `MegatronHost`."""

    def load_hf_weights(self, path: str) -> None:
        """Reads the HF weights of a directory into the chunks, one by one. Collective over: the training world."""
        ...


class Conversions(Part):
    """Converts with both save flags of megatron-core off. No rollout rank takes part. A result is whole or absent."""

    def __init__(self, rank: TrainingRank, saves: CheckpointSaves) -> None:
        """Stores the part whose saver writes the shards."""
        super().__init__(rank)
        self._saves = saves

    def convert_checkpoint(self, hf_dir: str | Path, out_dir: str | Path, *, overwrite: bool = False) -> Path:
        """Reads HF weights into the model, one by one, and saves only the model as Megatron's shards.

        Collective over: the training world, in phase ``convert``. Afterwards, the model and the optimizer's copies of
        the parameters have the HF weights. The optimizer's moments stay. If ``out_dir`` already holds a complete
        conversion of the same model in the same dtype, under any layout, nothing is read or written, and the model
        stays as it is. `load_model_weights` reads such a conversion. If two runs convert to one place, the second waits
        and then uses the result of the first.

        Args:
            hf_dir: A local HF directory that every trainer sees.
            out_dir: The directory to make, on storage that every trainer sees.
            overwrite: Whether the conversion may replace something else.

        Returns:
            The conversion's path.

        Raises:
            CheckpointMismatchError: On every rank, if ``out_dir`` is, or holds, something that the conversion may not
                replace, or if something else has a temporary name beside it; the message says what it is.
            CheckpointError: On every rank, if the conversion cannot be written, or another run holds the lock of
                ``out_dir`` for too long. ``out_dir`` then stays as it was.
            PhaseTimeoutError: If a trainer does not arrive in time; names it.
        """
        final = Path(out_dir).absolute()
        with self.rank.phase(Phase.CONVERT):
            model = ConvertedModel(fingerprint=model_fingerprint(hf_dir), dtype=self._dtype_name())
            with self._turn(final, model, overwrite=overwrite) as is_there:
                if is_there:
                    logger.info("%s is a complete conversion of %s; it is used as it is", final, hf_dir)
                else:
                    self._convert(Path(hf_dir).absolute(), final, model, overwrite=overwrite)
        return final

    def export_hf(
        self,
        out_dir: str | Path,
        *,
        source: str | Path,
        dtype: torch.dtype | None = None,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        overwrite: bool = False,
    ) -> Path:
        """Writes the model's weights as an HF directory, between two steps of a training run.

        Collective over: the training world, in phase ``convert``. Training rank 0 writes each weight when it is
        gathered. Besides the model, a rank needs memory for at most twice the largest weight. If rank 0 cannot write,
        all ranks do the remaining gathers, so that no rank hangs in one, and then raise.

        Args:
            out_dir: The directory to make; training rank 0 sees it.
            source: The HF directory that the model came from. Its configuration, its tokenizer and
                the weights of its MTP layers are copied. MTP layers are not trained.
            dtype: The dtype of all weights; None for each weight's dtype in ``source``, or the model's if ``source``
                does not have the weight.
            max_shard_bytes: Largest size of the weights in a file, in bytes.
            overwrite: Whether ``out_dir`` may replace something.

        Returns:
            The directory's path.

        Raises:
            CheckpointMismatchError: On every rank, if ``out_dir`` exists and ``overwrite`` is False, or if it is
                something that an export may not replace, or if something else has a temporary name beside it.
            CheckpointError: On every rank, if the directory cannot be written; no part of the export is then left in
                ``out_dir``.
            ModelError: On every rank, if the model has MTP layers, and ``source`` has no weights to copy for them.
            PhaseTimeoutError: If a trainer does not arrive in time; names it.
        """
        final, source = Path(out_dir).absolute(), Path(source)
        with self.rank.phase(Phase.CONVERT):
            dtypes = self.rank.together(Phase.CONVERT, lambda: _prepare_export(final, source, overwrite=overwrite))
            complete_param_gathers(self.rank.host.chunks)
            weights, failure = self.rank.host.export_hf_weights(), None
            try:
                if self.rank.training_rank == 0:
                    write_hf_directory(
                        final,
                        chain(weights, mtp_weights(source)),
                        source=source,
                        dtypes={name: getattr(torch, of_file) for name, of_file in dtypes.items()},
                        dtype=dtype,
                        max_shard_bytes=max_shard_bytes,
                        overwrite=overwrite,
                    )
                    logger.info("exported %s", final)
            except Exception as error:
                failure = error
            failure = self._drain(weights) or failure
            self.rank.together(Phase.CONVERT, lambda: None, failure=failure)
        return final

    def _dtype_name(self) -> str:
        parameter = next(self.rank.host.chunks[0].parameters())
        return str(parameter.dtype).removeprefix("torch.")

    def _layout(self) -> dict[str, int]:
        return asdict(ParallelLayout.of(self.rank.megatron, world_size=self.rank.training_size))

    @contextmanager
    def _turn(self, final: Path, model: ConvertedModel, *, overwrite: bool) -> Iterator[bool]:
        """Locks the place during the body: rank 0 holds the lock for all ranks. Yields True if a conversion exists."""
        with ExitStack() as held:

            def decide() -> bool:
                make_parent(final)
                patience = max(self.rank.remaining() - timedelta(seconds=SLACK_S), self.rank.remaining() / 2)
                held.enter_context(
                    exclusive(lock_path(final), timeout=patience, setting=timeout_setting(Phase.CONVERT))
                )
                return find_conversion(final, model, overwrite=overwrite) is not None

            yield self.rank.together(Phase.CONVERT, decide)

    def _convert(self, hf_dir: Path, final: Path, model: ConvertedModel, *, overwrite: bool) -> None:
        if self.rank.training_rank == 0:
            logger.info(
                "conversion of %s to %s on the %d training ranks alone: fully_parallel_save=False, "
                "validate_access_integrity=False",
                hf_dir,
                final,
                self.rank.training_size,
            )
        pending = pending_path(final)
        with removed_on_failure(pending, what="the conversion") if self.rank.training_rank == 0 else ExitStack():
            self.rank.host.load_hf_weights(str(hf_dir))
            if self.rank.host.optimizer is not None:
                self.rank.host.optimizer.reload_model_params()
            saver = self._saves.open_saver()
            saver.begin(
                model_state(self.rank.host.chunks),
                pending / SHARDS,
                content_metadata=CONTENT_METADATA,
                prepare=lambda: (start_pending(final, what="a conversion", holds=OURS) / SHARDS).mkdir(),
                commit=lambda files, notes: self._publish(files, hf_dir, final, model, overwrite=overwrite),
                timeout=self.rank.remaining(),
                background=False,
            )
            saver.finish(self.rank.remaining())

    def _publish(
        self, written: Mapping[str, WrittenFile], hf_dir: Path, final: Path, model: ConvertedModel, *, overwrite: bool
    ) -> None:
        pending = pending_path(final)
        (pending / HF_FILES).mkdir()
        copy_hf_files(hf_dir, pending / HF_FILES, dtype=model.dtype)
        files = file_records(pending, written)
        publish_conversion(pending, final, model, layout=self._layout(), files=files, overwrite=overwrite)
        logger.info("converted %s to %s", hf_dir, final)

    @staticmethod
    def _drain(weights: Iterator[Any]) -> Exception | None:
        """Takes the remaining items of an export, so that no other rank hangs in its collectives."""
        try:
            deque(weights, maxlen=0)  # a for loop would keep each item until the next one is made
        except Exception as error:
            return error
        return None


def _prepare_export(final: Path, source: Path, *, overwrite: bool) -> dict[str, str]:
    """Refuses a place that is taken; returns the dtype's name of every weight in the source."""
    check_export(final, overwrite=overwrite)
    check_mtp_source(source)
    return {name: str(dtype).removeprefix("torch.") for name, dtype in HfReader(source).dtypes().items()}
