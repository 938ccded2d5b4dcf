"""Two steps of a run side by side: what is stale is named, and honest pairs raise no alarm."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rl_safe_workers.checkpoint.audit_steps import StepsReport, audit_steps
from rl_safe_workers.cli.main import main
from rl_safe_workers.errors import CheckpointError, UsageError
from tests.torch_dist import Cut, grid, write_checkpoint

EXPERTS, HIDDEN, STALE = 4, 8, 2
EXPERT, DENSE, NORM = "decoder.layers.0.mlp.experts.experts.linear_fc1.weight", "embedding.weight", "norm.weight"
SHAPES = {EXPERT: (EXPERTS, HIDDEN, HIDDEN), DENSE: (16, HIDDEN), NORM: (HIDDEN,)}
STATES = ("param", "exp_avg", "exp_avg_sq")
State = dict[str, torch.Tensor]


def key_of(state: str, weight: str) -> str:
    return f"optimizer.state.{state}.{weight}"


class Adam:
    """A run in miniature: fp32 weights, their moments, and weights in the precision of the model."""

    def __init__(self, dtype: torch.dtype, *, lr: float, seed: int = 0, decay: float = 0.0) -> None:
        self.dtype, self.lr, self.decay = dtype, lr, decay
        self.generator = torch.Generator().manual_seed(seed)
        self.state: State = {}
        for name, shape in SHAPES.items():
            # Norms begin at one: small updates of those are lost in bf16.
            start = torch.ones(shape) if name == NORM else torch.randn(shape, generator=self.generator) / 10
            self.state |= {key_of("param", name): start, **{key_of(m, name): torch.zeros(shape) for m in STATES[1:]}}

    def step(self, *, unused: tuple[int, ...] = ()) -> None:
        """One update; experts in ``unused`` get no gradient."""
        for name, shape in SHAPES.items():
            gradient = torch.randn(shape, generator=self.generator)
            if name == EXPERT:
                gradient[list(unused)] = 0
            param, m, v = (self.state[key_of(state, name)] for state in STATES)
            m.mul_(0.9).add_(gradient, alpha=0.1)
            v.mul_(0.99).add_(gradient**2, alpha=0.01)
            param.mul_(1 - self.lr * self.decay).sub_(self.lr * m / (v.sqrt() + 1e-8))

    def values(self) -> State:
        weights = {name: self.state[key_of("param", name)].to(self.dtype) for name in SHAPES}
        return {key: value.clone() for key, value in (self.state | weights).items()}


def write(folder: Path, values: State, *, without: tuple[str, ...] = ()) -> Path:
    cuts: dict[str, Cut] = {}
    for key, value in values.items():
        shape = tuple(value.shape)
        # States are cut in another way than weights, as by the distributed optimizer.
        sizes = (2, *shape[1:]) if key in SHAPES and len(shape) > 1 else (max(1, shape[0] // 4), *shape[1:])
        if key not in without:
            cuts[key] = grid(shape, sizes, value.dtype)
    write_checkpoint(folder, cuts, values=values)
    return folder


def pair(folder: Path, spoil: Callable[[State, State], None], dtype: torch.dtype = torch.float32) -> StepsReport:
    run = Adam(dtype, lr=1e-2)
    run.step()
    first = run.values()
    run.step()
    second = run.values()
    spoil(first, second)
    return audit_steps(write(folder / "a", first), write(folder / "b", second))


def copy_all(first: State, second: State) -> None:
    second.update(first)


def keep_weights(first: State, second: State) -> None:
    second.update({name: first[name] for name in SHAPES})


def keep_optimizer(first: State, second: State) -> None:
    second.update({key: first[key] for key in first if key.startswith("optimizer")})


def keep_moments(first: State, second: State) -> None:
    second.update({key: first[key] for key in first if "exp_avg" in key})


def keep_one_expert(first: State, second: State) -> None:
    second[EXPERT][STALE] = first[EXPERT][STALE]


def keep_moments_of_one_expert(first: State, second: State) -> None:
    for state in STATES[1:]:
        second[key_of(state, EXPERT)][STALE] = first[key_of(state, EXPERT)][STALE]


def keep_one_fp32_expert(first: State, second: State) -> None:
    second[key_of("param", EXPERT)][STALE] = first[key_of("param", EXPERT)][STALE]
    keep_one_expert(first, second)


WEIGHTS = EXPERTS + 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("spoil", "counts"),
    [
        (copy_all, {"copy": 1}),
        (keep_weights, {"weights": WEIGHTS}),
        (keep_optimizer, {"optimizer": WEIGHTS}),
        (keep_moments, {"optimizer": WEIGHTS}),
        (keep_one_expert, {"weights": 1}),
        (keep_one_fp32_expert, {"weights": 1}),
        (keep_moments_of_one_expert, {"optimizer": 1}),
    ],
)
def test_what_is_stale_is_found(
    spoil: Callable[[State, State], None], counts: dict[str, int], dtype: torch.dtype, tmp_path: Path
) -> None:
    report = pair(tmp_path, spoil, dtype)
    assert not report.ok
    assert report.counts == counts
    if counts in ({"weights": 1}, {"optimizer": 1}):
        assert report.problems[0].text.startswith(f"{EXPERT}[{STALE}]: ")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("lr", [1e-2, 1e-6])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_honest_steps_raise_no_alarm(dtype: torch.dtype, lr: float, decay: float, tmp_path: Path) -> None:
    run = Adam(dtype, lr=lr, decay=decay)
    run.step(unused=(0, 1))
    before = write(tmp_path / "0", run.values())
    for number in range(1, 6):
        run.step(unused=(0,))
        after = write(tmp_path / str(number), run.values())
        report = audit_steps(before, after)
        assert (report.ok, report.units, report.not_judged) == (True, WEIGHTS, 0), report.problems
        before = after


def test_low_precision_without_fp32_weights_is_not_judged(tmp_path: Path) -> None:
    run = Adam(torch.bfloat16, lr=1e-6)
    run.step()
    first = run.values()
    run.step()
    second = run.values()
    keep_weights(first, second)
    without = tuple(key_of("param", name) for name in SHAPES)
    report = audit_steps(write(tmp_path / "a", first, without=without), write(tmp_path / "b", second, without=without))
    assert (report.ok, report.not_judged) == (True, WEIGHTS)


def test_steps_that_are_cut_in_another_way_are_compared_too(tmp_path: Path) -> None:
    run = Adam(torch.float32, lr=1e-2)
    run.step()
    first = write(tmp_path / "a", run.values())
    values = run.values()
    write_checkpoint(
        tmp_path / "b", {key: grid(tuple(v.shape), tuple(v.shape)) for key, v in values.items()}, values=values
    )
    assert audit_steps(first, tmp_path / "b").counts == {"copy": 1}


def test_keys_of_one_step_alone_are_named(tmp_path: Path) -> None:
    values = Adam(torch.float32, lr=1.0).values()
    first, second = write(tmp_path / "a", values), write(tmp_path / "b", values, without=(NORM,))
    report = audit_steps(first, second)
    assert report.problems[0].text == f"{NORM} is in the first step only"


def test_another_model_is_refused(tmp_path: Path) -> None:
    values = Adam(torch.float32, lr=1.0).values()
    other = Adam(torch.bfloat16, lr=1.0).values()
    with pytest.raises(CheckpointError, match="has another shape or dtype in the second step"):
        audit_steps(write(tmp_path / "a", values), write(tmp_path / "b", other))


def test_one_checkpoint_twice_is_refused(tmp_path: Path) -> None:
    first = write(tmp_path / "a", Adam(torch.float32, lr=1.0).values())
    with pytest.raises(UsageError, match="is the same checkpoint as the first"):
        audit_steps(first, first)


def test_the_command_prints_what_is_stale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair(tmp_path, keep_one_expert)
    command = ["audit", str(tmp_path / "a"), str(tmp_path / "b")]
    assert main(command) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{tmp_path}/a to {tmp_path}/b: {WEIGHTS - 1} of {WEIGHTS} weights moved"
    assert lines[1] == f"weights: {EXPERT}[{STALE}]: the weight is equal in both steps, but the optimizer moved"
    assert lines[2].startswith("STALE: 1 problems (")
    assert main([*command, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["counts"] == {"weights": 1}
    assert main([*command, "--deep"]) == 2
