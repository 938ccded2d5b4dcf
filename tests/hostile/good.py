"""A good input for every command: what its memory is compared with, and proof that the harness can see it end well."""

from __future__ import annotations

from collections.abc import Callable

from tests.hostile.case import Command, Site
from tests.hostile.checkpoints import FOREIGN, OURS, put_checkpoint
from tests.hostile.corpus_folders import OPERATIONS
from tests.hostile.corpus_recipes import BASE, RECIPE, put_recipe
from tests.hostile.entries import save_step
from tests.hostile.models import put_model
from tests.hostile.prompts import put_prompts


def _checkpoint(*arguments: str, entry: str, root: str) -> Callable[[Site], Command]:
    def make(site: Site) -> Command:
        put_checkpoint(site, root)
        put_prompts(site.input / "prompts.parquet")
        return Command(entry, arguments)

    return make


def _folder(command: Command) -> Callable[[Site], Command]:
    def make(site: Site) -> Command:
        for step in (1, 2, 3):
            save_step(site.input / command.arguments[0], step, saved_at=1000.0 + step)
        return command

    return make


def _recipe(entry: str, *arguments: str) -> Callable[[Site], Command]:
    def make(site: Site) -> Command:
        put_recipe(site, BASE)
        return Command(entry, arguments)

    return make


def _prompts(site: Site) -> Command:
    put_prompts(site.input / "prompts.parquet")
    return Command("prompts", ("prompts.parquet",))


def _model(entry: str) -> Callable[[Site], Command]:
    def make(site: Site) -> Command:
        put_model(site.input / "model")
        return Command(entry, ("model",))

    return make


GOOD: dict[str, Callable[[Site], Command]] = {
    "audit": _checkpoint(FOREIGN, "--deep", entry="audit", root=FOREIGN),
    "index": _checkpoint(FOREIGN, entry="index", root=FOREIGN),
    "common": _checkpoint(FOREIGN, entry="common", root=FOREIGN),
    "load": _checkpoint(FOREIGN, entry="load", root=FOREIGN),
    "manifest": _checkpoint(OURS, entry="manifest", root=OURS),
    **{name: _folder(command) for name, (command, _) in OPERATIONS.items()},
    "lock": lambda site: Command("lock", ("model.lock",)),
    "leftovers": lambda site: Command("leftovers", (".",)),
    "recipe": _recipe("recipe", RECIPE),
    "plan": _recipe("plan", RECIPE),
    "prompts": _prompts,
    "shape": _model("shape"),
    "weights": _model("weights"),
    "resume": _checkpoint("checkpoints", "prompts.parquet", entry="resume", root=OURS),
}
"""By name of the entry: puts a good input into a site, and says how the command is called on it."""
