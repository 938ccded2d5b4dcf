"""Runs a conversion as a separate job: with trainers, without rollout ranks, and with the same cleanup as a run."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from rl_safe_workers.checkpoint.folders.conversion_folder import (
    ConvertedModel,
    MegatronWeights,
    converted_dtype,
    find_conversion,
    find_megatron_weights,
    lock_path,
    own_hf_files,
)
from rl_safe_workers.checkpoint.folders.lock import check_lock
from rl_safe_workers.checkpoint.folders.manifest import model_fingerprint
from rl_safe_workers.checkpoint.folders.publish import check_export
from rl_safe_workers.config import Dtype, RunConfig
from rl_safe_workers.driver.cluster.cluster import Cluster
from rl_safe_workers.driver.cluster.interrupts import Interrupts
from rl_safe_workers.driver.inputs.preflight import layout_of
from rl_safe_workers.driver.outputs.console import RunConsole
from rl_safe_workers.driver.session import Session
from rl_safe_workers.errors import (
    CheckpointError,
    CheckpointMismatchError,
    ConfigError,
    ModelError,
    RunError,
    UsageError,
)
from rl_safe_workers.model_files import read_model_json
from rl_safe_workers.models.hf_directory import check_mtp_source, read_hf_directory
from rl_safe_workers.topology.layout import check_layout, check_model

DTYPES: Sequence[Dtype] = get_args(Dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The source and the target of a conversion."""

    source: Path
    target: Path
    overwrite: bool
    """True if the target may replace an existing folder."""
    dtype: str | None
    """The dtype that ``model.dtype`` asks for; None for the dtype of the source."""


def convert_to_megatron(config: RunConfig, place: Place) -> str:
    """Converts an HF directory to Megatron's shards.

    Args:
        config: Layout, timeouts and cluster. Its model is replaced by the source of ``place``.
        place: The source is an HF directory, the target a directory for the shards.

    Returns:
        One line that reports the result.

    Raises:
        UsageError: Before anything is started or written.
        RunError: If the conversion fails or is interrupted.
    """
    config = _for_model(config, place.source, has_weights=True)
    config.model.dtype = _dtype(place.dtype or _dtype_of(place.source))
    model = ConvertedModel(fingerprint=model_fingerprint(place.source), dtype=config.model.dtype)
    target = place.target.absolute()
    if find_conversion(target, model, overwrite=place.overwrite) is not None:
        return f"{target} is a complete conversion of {place.source} in {model.dtype} already"
    try:
        check_lock(lock_path(target))
    except CheckpointError as error:
        raise CheckpointMismatchError(str(error)) from error
    arguments = (place.source.absolute(), target, place.overwrite)
    done = _run(config, lambda session: session.convert("convert_to_megatron", *arguments))
    return f"converted {place.source} to {done} in {model.dtype}"


def convert_to_hf(config: RunConfig, place: Place) -> str:
    """Converts the model of a Megatron checkpoint to an HF directory.

    Args:
        config: As for `convert_to_megatron`, but ``model.path`` is used: the HF directory that the model came from. If
            it is empty, the copy of the model's configuration in a conversion is used.
        place: The source is a conversion, a training checkpoint or a torch_dist directory; the target is an HF
            directory.

    Returns:
        One line that reports the result.

    Raises:
        UsageError: Before anything is started or written.
        RunError: If the checkpoint is not complete, or the conversion fails or is interrupted.
    """
    weights = find_megatron_weights(place.source)
    source = _hf_source(config, place.source)
    config = _for_model(config, source, has_weights=False)
    check_mtp_source(source)
    _check_is_of(weights, place.source, source)
    check_export(place.target, overwrite=place.overwrite)
    config.model.dtype = _dtype(place.dtype or _converted_dtype(weights) or _dtype_of(source))
    arguments = (place.source.absolute(), place.target.absolute(), place.dtype, place.overwrite)
    done = _run(config, lambda session: session.convert("convert_to_hf", *arguments))
    return f"converted {place.source} to {done}"


def _hf_source(config: RunConfig, checkpoint: Path) -> Path:
    if config.model.path:
        return Path(config.model.path)
    if (own := own_hf_files(checkpoint)) is not None:
        return own
    raise ConfigError(
        f"{checkpoint} has no copy of the model's configuration: give model.path=DIR, the HF directory it came from"
    )


def _check_is_of(weights: MegatronWeights, checkpoint: Path, source: Path) -> None:
    """Compares fingerprints, if the HF directory has the weights that a fingerprint is computed from."""
    if any(source.glob("*.safetensors")):
        weights.check_is_of(model_fingerprint(source), path=checkpoint)


def _for_model(config: RunConfig, path: Path, *, has_weights: bool) -> RunConfig:
    """Returns a copy of the configuration for this model, without rollout ranks.

    Raises:
        UsageError: If the model cannot be read or does not divide over the layout.
    """
    shape = read_hf_directory(path, has_weights=has_weights)
    layout = layout_of(config)
    check_layout(layout)
    check_model(layout, shape)
    ready = deepcopy(config)
    ready.model.path, ready.model.create, ready.cluster.num_rollouts = str(path.absolute()), None, 0
    ready.trainer.save_freq = -1
    return ready


def _dtype(name: str) -> Dtype:
    for dtype in DTYPES:
        if name == dtype:
            return dtype
    raise ConfigError(f"model.dtype={name} cannot be converted: set it to {' or '.join(DTYPES)}")


def _dtype_of(hf_dir: Path) -> str:
    """Returns the dtype of the weights from an HF directory's config.json (``torch_dtype`` in transformers 4)."""
    fields = read_model_json(hf_dir / "config.json")
    name = fields.get("dtype") or fields.get("torch_dtype")
    if not isinstance(name, str):
        raise ModelError(f"{hf_dir / 'config.json'} does not say which dtype the weights have: set model.dtype")
    return name


def _converted_dtype(weights: MegatronWeights) -> str | None:
    return None if weights.manifest is None else converted_dtype(weights.manifest.driver_state)


def _run(config: RunConfig, work: Callable[[Session], Any]) -> str:
    """Starts the trainers, runs the work, and ends all processes, also after a failure."""
    interrupts, patience_s = Interrupts(), config.rl_safe.teardown.kill_after_s
    cluster = Cluster(config, run_id=uuid.uuid4().hex[:12], interrupts=interrupts)
    session = Session(config, cluster, RunConsole(), interrupts)
    folder = Path(config.trainer.output_dir) / str(config.trainer.run_name)
    with interrupts.listening():
        try:
            session.connect()
            result = str(work(session))
            disagreed = session.teardown()
            if disagreed:
                raise RunError("; ".join(f"training rank {r} at teardown: {text}" for r, text in disagreed.items()))
        except BaseException as error:
            if isinstance(error, UsageError):
                error.exit_code = RunError.exit_code  # exit code 2 promises that nothing was started
            blamed = cluster.keep_evidence(error, folder, patience_s=patience_s)
            if blamed is not error:
                raise blamed from error
            raise
        finally:
            cluster.close(kill_after_s=patience_s)
    return result
