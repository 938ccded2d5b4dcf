"""Implements ``rl-safe convert``: converts HF weights to Megatron's shards, or shards to HF weights."""

from __future__ import annotations

import argparse

from rl_safe_workers.cli.terminal import to_path
from rl_safe_workers.errors import ConfigError
from rl_safe_workers.foreign_files import printable
from rl_safe_workers.recipe import load_settings

DESCRIPTION = """
Converts a model on training ranks, in the parallel layout that the keys set.
`--hf DIR --out DIR` writes Megatron's torch_dist shards, which load under any layout.
`--megatron DIR --hf-out DIR` writes an HF directory, from such a conversion or from a checkpoint of a run. For a
checkpoint also give model.path=DIR, the HF directory that the run started from.
The target appears when it is complete. A complete conversion of the same model is used again. A truncated one is made
anew. If two runs convert to one target, one waits for the other, up to rl_safe.timeouts.convert seconds.
Default of cluster.num_trainers: the smallest number that fits the layout. Default of model.dtype: the source's.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.description = DESCRIPTION
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--hf", metavar="DIR", type=to_path, help="HF directory to read; needs --out")
    source.add_argument("--megatron", metavar="DIR", type=to_path, help="Megatron checkpoint to read; needs --hf-out")
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--out", metavar="DIR", type=to_path, help="directory of the shards to write")
    target.add_argument("--hf-out", metavar="DIR", type=to_path, help="HF directory to write")
    parser.add_argument("--recipe", metavar="FILE", help="take layout, timeouts and cluster from a recipe")
    parser.add_argument("--overwrite", action="store_true", help="replace the target, even if it is something else")
    parser.add_argument(
        "overrides",
        metavar="key=value",
        nargs="*",
        help="dotted key, YAML value: megatron.expert_model_parallel_size=8",
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="log more than warnings")
    parser.set_defaults(execute=run_convert)


def run_convert(arguments: argparse.Namespace) -> int:
    """Converts, prints one line about the result, and returns the exit code.

    Raises:
        ConfigError: If the options do not belong together.
    """
    if (arguments.hf is None) != (arguments.out is None):
        raise ConfigError("convert: --hf goes with --out, and --megatron with --hf-out")
    config = load_settings(arguments.recipe, arguments.overrides, name="convert")
    from rl_safe_workers.driver.conversion_job import Place, convert_to_hf, convert_to_megatron

    named = {override.partition("=")[0] for override in arguments.overrides}
    to_megatron = arguments.hf is not None
    if not to_megatron and arguments.recipe is not None and "model.path" not in named:
        config.model.path = ""  # the recipe's model need not be the checkpoint's
    place = Place(
        source=arguments.hf if to_megatron else arguments.megatron,
        target=arguments.out if to_megatron else arguments.hf_out,
        overwrite=arguments.overwrite,
        dtype=config.model.dtype if "model.dtype" in named else None,
    )
    print(printable((convert_to_megatron if to_megatron else convert_to_hf)(config, place)))
    return 0
