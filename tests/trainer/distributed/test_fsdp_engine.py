"""FSDP trains an encoder in pieces as one process trains the whole, and its state goes to and from every other engine.

`tests/trainer/test_exactness.py` and `tests/trainer/test_trajectory.py` compare whole runs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from configs import resolve_recipe
from data_pipeline.core.errors import UserError
from tests.gloo import run_ranks
from tests.trainer.test_exactness import configure, own_part
from trainer.build import build_training
from trainer.distributed.collectives import rank, world_size
from trainer.distributed.engines.ddp_engine import DDPEngine
from trainer.distributed.engines.engine import Engine, EngineInputs
from trainer.distributed.engines.fsdp_engine import FSDPConfig, FSDPEngine
from trainer.optim.optimizers import AdamWConfig, OptimizerConfig, SGDConfig, build_optimizer

BATCH_SIZE = 8
RATE = 0.05
OPTIMIZERS: dict[str, OptimizerConfig] = {"adamw": AdamWConfig(weight_decay=0.05), "sgd": SGDConfig()}
PRECISIONS = ("float32", "bfloat16", "float16")
States = tuple[dict[str, Tensor], dict[str, Tensor]]


class Chain(nn.Module):
    """Odd sizes, so that pieces differ and one rank has none of the last bias; a parameter that is not trained."""

    def __init__(self, *, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
        self.last = nn.Linear(3, 1)
        self.fixed = nn.Parameter(torch.ones(6), requires_grad=False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.last(torch.tanh(self.blocks(x * self.fixed)))
        return z


def engine_of(optimizer: OptimizerConfig, *, seed: int = 0) -> FSDPEngine:
    module = Chain(seed=seed)
    return FSDPEngine(module, optimizer=optimizer, blocks=tuple(module.blocks))


def whole_batch(step: int) -> Tensor:
    return torch.randn(BATCH_SIZE, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def loss_of(module: Any, x: Tensor) -> Tensor:
    """Return a loss of two views, after two forward passes."""
    loss: Tensor = (module(x) - 2 * module(x.flip(1)) + 1).square().mean()
    return loss


def train(engine: FSDPEngine, steps: range, **step_options: Any) -> list[Tensor]:
    norms = []
    for step in steps:
        engine.backward(loss_of(engine, whole_batch(step).chunk(world_size())[rank()]))
        norms.append(engine.gradient_norm())
        engine.step(learning_rate=torch.tensor(RATE), **step_options)
    return norms


def states_of(engine: Engine) -> States:
    module_state, optimizer_state = (
        {name: value.clone() for name, value in state.items()}
        for state in (engine.module_state(), engine.optimizer_state())
    )
    return module_state, optimizer_state


def same_bits(a: States, b: States) -> bool:
    return all(
        x.keys() == y.keys() and all(torch.equal(x[key], y[key]) for key in x) for x, y in zip(a, b, strict=True)
    )


def in_pieces() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, optimizer in OPTIMIZERS.items():
        engine = engine_of(optimizer)
        found[name] = {"norms": train(engine, range(3)), "states": states_of(engine)}
    found["rows"] = {name: value.to_local().shape[0] for name, value in engine._trained.items()}
    with torch.no_grad():
        engine(whole_batch(0))
    found["is_cut"] = all(hasattr(value, "to_local") for value in engine.module.parameters() if value.requires_grad)
    found["fixed_is_whole"] = not hasattr(engine.module.fixed, "to_local")
    assert isinstance(engine.module, Chain)
    found["units"] = [type(unit).__name__ for unit in (*engine.module.blocks, engine.module)]

    before = states_of(engine)
    engine.backward(loss_of(engine, whole_batch(0) * torch.nan))
    found["norm_of_nan"] = engine.gradient_norm()
    engine.step(learning_rate=RATE, skip=torch.tensor(True))
    found["skipped_stays"] = same_bits(before, states_of(engine))
    found["no_gradient_left"] = all(value.grad is None for value in engine.module.parameters())

    taken_up = engine_of(OPTIMIZERS["sgd"], seed=1)
    taken_up.load(*before)
    found["taken_up"] = same_bits(before, states_of(taken_up))
    train(taken_up, range(3, 5))
    train(engine, range(3, 5))
    found["goes_on"] = same_bits(states_of(engine), states_of(taken_up))

    scaled, huge = engine_of(OPTIMIZERS["sgd"]), engine_of(OPTIMIZERS["sgd"])
    part = whole_batch(0).chunk(world_size())[rank()]
    scaled.backward(1024 * loss_of(scaled, part))
    scaled.step(learning_rate=torch.tensor(RATE), gradient_scale=torch.tensor(1024.0))
    once = engine_of(OPTIMIZERS["sgd"])
    train(once, range(1))
    found["scale_is_divided"] = same_bits(states_of(scaled), states_of(once))
    huge.backward(1e30 * loss_of(huge, part))
    found["huge_norm"] = huge.gradient_norm() / 1e30
    huge.backward(1e60 * loss_of(huge, part))
    found["overflown_norm"] = huge.gradient_norm()

    with engine.frozen():
        x = part.requires_grad_()
        engine.backward(loss_of(engine, x))
    found["frozen"] = x.grad is not None and all(value.grad is None for value in engine.module.parameters())

    with_number = Chain()
    with_number.register_parameter("scale", nn.Parameter(torch.ones(())))
    for given, words in (
        ((before[0], {}), "does not fit: momentum_buffer/blocks.0.bias is in only one"),
        ((before[0], before[1] | {"momentum_buffer/last.bias": torch.zeros(3)}), "last.bias is \\(3,\\)"),
        (({**before[0], "last.bias": torch.zeros(3)}, before[1]), "size mismatch for last.bias"),
    ):
        with pytest.raises(RuntimeError, match=words):
            engine.load(*given)
    with pytest.raises(UserError, match="cannot cut the parameter scale, which is a single number"):
        FSDPEngine(with_number, optimizer=OPTIMIZERS["sgd"])
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(in_pieces, 2)


@pytest.mark.ranks
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_ranks_follow_plain_torch_in_one_process(name: str, ranks: list[dict[str, Any]]) -> None:
    module = Chain()
    optimizer = build_optimizer(OPTIMIZERS[name], module)
    norms = []
    for step in range(3):
        loss_of(module, whole_batch(step)).backward()  # type: ignore[no-untyped-call]
        gradients = [value.grad.flatten() for value in module.parameters() if value.grad is not None]
        norms.append(torch.cat(gradients).norm().float())
        for group in optimizer.param_groups:
            group["lr"] = RATE
        optimizer.step()
        optimizer.zero_grad()
    for found in ranks:
        torch.testing.assert_close(found[name]["norms"], norms, rtol=1e-6, atol=0)
        for key, value in module.state_dict().items():
            torch.testing.assert_close(found[name]["states"][0][key], value, rtol=1e-6, atol=1e-9)


@pytest.mark.ranks
def test_a_rank_keeps_pieces_whenever_no_pass_runs(ranks: list[dict[str, Any]]) -> None:
    rows = [found["rows"] for found in ranks]
    assert rows[0] == {f"blocks.0.{kind}": 3 for kind in ("weight", "bias")} | {
        "blocks.1.weight": 2,
        "blocks.1.bias": 2,
        "last.weight": 1,
        "last.bias": 1,
    }
    assert [rows[1][name] for name in rows[0]] == [2, 2, 1, 1, 0, 0]
    for found in ranks:
        assert found["is_cut"]
        assert found["fixed_is_whole"]
        assert found["units"] == ["FSDPLinear", "FSDPLinear", "FSDPChain"]


@pytest.mark.ranks
def test_a_skipped_step_leaves_no_trace(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["norm_of_nan"].isnan()
        assert found["skipped_stays"]
        assert found["no_gradient_left"]


@pytest.mark.ranks
def test_gradients_are_scaled_measured_and_passed_on(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["scale_is_divided"]
        assert found["frozen"]
        torch.testing.assert_close(found["huge_norm"], found["sgd"]["norms"][0])
        assert found["overflown_norm"].isinf()


@pytest.mark.ranks
def test_state_is_whole_and_goes_to_ddp_in_one_process(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["taken_up"]
        assert found["goes_on"]
        for name, optimizer in OPTIMIZERS.items():
            states = found[name]["states"]
            assert same_bits(states, ranks[0][name]["states"])
            engine = DDPEngine(Chain(seed=1), optimizer=optimizer)
            engine.load(*states)
            assert same_bits(states_of(engine), states)


def restart() -> dict[str, Any]:
    """Train four steps; train two, and two more from their state. The last layer has fewer rows than ranks."""
    engine, again = engine_of(OPTIMIZERS["sgd"]), engine_of(OPTIMIZERS["sgd"], seed=1)
    train(engine, range(2))
    again.load(*states_of(engine))
    train(engine, range(2, 4))
    train(again, range(2, 4))
    return {"same_bits": same_bits(states_of(engine), states_of(again)), "state": states_of(engine)[0]}


@pytest.mark.ranks
def test_a_restart_on_four_ranks_ends_in_the_same_bits() -> None:
    module = Chain()
    engine = DDPEngine(module, optimizer=OPTIMIZERS["sgd"])
    for step in range(4):
        engine.backward(loss_of(engine, whole_batch(step)))
        engine.step(learning_rate=RATE)
    for found in run_ranks(restart, 4):
        assert found["same_bits"]
        for name, value in module.state_dict().items():
            torch.testing.assert_close(found["state"][name], value, rtol=1e-6, atol=1e-9)


def real_steps(engine: str, precision: str) -> dict[str, States]:
    config = configure("simsiam", [f"precision={precision}", f"engine.kind={engine}"])
    training = build_training(config, num_samples=BATCH_SIZE, device=torch.device("cpu"))
    for _ in range(3):
        training.step(own_part(), learning_rates=dict.fromkeys(training.engines, 0.01))
    assert isinstance(training.engines["encoder"], FSDPEngine if engine == "fsdp" else DDPEngine)
    return {name: states_of(training.engines[name]) for name in ("encoder", "viewmaker")}


def compare_real_steps() -> dict[str, bool]:
    found = {}
    for precision in PRECISIONS:
        cut, whole = real_steps("fsdp", precision), real_steps("ddp", precision)
        found[precision] = all(same_bits(cut[name], whole[name]) for name in cut)
    return found


@pytest.mark.ranks
def test_a_real_run_ends_in_the_bits_of_ddp() -> None:
    """On two ranks, where a sum has only one order; with a viewmaker, and a predictor that DDP trains."""
    for found in run_ranks(compare_real_steps, 2):
        assert found == dict.fromkeys(PRECISIONS, True)


def test_a_single_process_and_small_modules_have_ddp() -> None:
    config, given = FSDPConfig(), EngineInputs(OPTIMIZERS["sgd"], BATCH_SIZE)
    assert isinstance(config.build(Chain(), given), DDPEngine)
    assert [config.of_module(name).kind for name in ("encoder", "viewmaker", "objective")] == ["fsdp", "ddp", "ddp"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["compile=true"], "compile=true needs whole parameters.*compile=false"),
        (["compile=both"], "compile=both needs whole parameters.*compile=false"),
        (["probe.online_every_steps=10"], "probe.online_every_steps needs a whole encoder.*set it to null"),
        (["optimizer={kind: lars}"], "optimizer lars needs the norms of whole parameters.*engine.kind=ddp"),
    ],
)
def test_what_it_cannot_train_is_refused_in_one_sentence(change: list[str], words: str) -> None:
    if "lars" in change[0]:
        pytest.importorskip("timm")
    with pytest.raises(UserError, match=words) as error:
        resolve_recipe("debug:image", ["engine.kind=fsdp", *change])
    assert "\n" not in str(error.value)
