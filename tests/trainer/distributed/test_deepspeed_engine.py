"""Under DeepSpeed a run follows plain torch in one process, and its state goes to and from every other engine."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from configs import resolve_recipe
from data_pipeline.core.errors import UserError
from tests.gloo import run_ranks
from tests.small_encoder import CONVNET
from tests.tiny_data import write_tiny_pair
from trainer.adversary import reverse_gradient
from trainer.build import assemble
from trainer.config import RunConfig
from trainer.data import open_stream
from trainer.distributed.collectives import rank, world_size
from trainer.distributed.engines import deepspeed_engine
from trainer.distributed.engines.ddp_engine import DDPConfig, DDPEngine
from trainer.distributed.engines.deepspeed_engine import DeepSpeedConfig, DeepSpeedEngine
from trainer.modules import build_modules, build_run_objective
from trainer.optim.optimizers import AdamConfig, AdamWConfig, OptimizerConfig, SGDConfig, build_optimizer

CPU = torch.device("cpu")
BATCH_SIZE = 8
NUM_STEPS = 10
RATES = {"encoder": 0.02, "viewmaker": 2e-3}
SGD = SGDConfig(momentum=0.9, weight_decay=1e-4)
ADAM = AdamConfig(weight_decay=1e-3)
ADAMW = AdamWConfig(weight_decay=0.05)  # two groups of parameters
Game = Literal["encoder", "simultaneous", "alternating"]
State = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A game, the optimizer of its encoder (a viewmaker has Adam), and how DeepSpeed is to train it."""

    game: Game
    stage: Literal[1, 2, 3]
    optimizer: OptimizerConfig = SGD
    offload: bool = False
    memory_format: torch.memory_format = torch.contiguous_format

    @property
    def name(self) -> str:
        extra = ("-offload" if self.offload else "") + (
            "-channels_last" if self.memory_format is torch.channels_last else ""
        )
        return f"{self.game}-{self.stage}-{self.optimizer.kind}{extra}"

    @property
    def config(self) -> DeepSpeedConfig:
        return DeepSpeedConfig(zero_stage=self.stage, offload_optimizer=self.offload)


CASES = {
    case.name: case
    for case in [
        Case("encoder", 1),
        Case("encoder", 2, ADAM),
        Case("encoder", 3),
        Case("encoder", 3, ADAMW),
        Case("simultaneous", 1),
        Case("alternating", 2),
        Case("simultaneous", 2, ADAM, offload=True),
        Case("encoder", 3, offload=True),
        Case("simultaneous", 2, memory_format=torch.channels_last),
    ]
}


class Encoder(nn.Module):
    """Smooth, so that rounding stays rounding; odd sizes, so that pieces need padding; one layer that stage 3 cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 5, 3, padding=1)
        self.first = nn.Linear(5 * 6 * 6, 61)
        self.second = nn.Linear(61, 7)

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.second(torch.tanh(self.first(torch.tanh(self.convolution(x)).flatten(1))))
        return z


class Viewmaker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(3, 9, 3, padding=1)
        self.outer = nn.Conv2d(9, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.outer(torch.tanh(self.inner(x))))


def players(game: Game, *, seed: int = 0) -> dict[str, nn.Module]:
    torch.manual_seed(seed)
    modules: dict[str, nn.Module] = {"encoder": Encoder(), "viewmaker": Viewmaker()}
    return {"encoder": modules["encoder"]} if game == "encoder" else modules


class Plain:
    """A module of plain torch in one process, on the whole batch."""

    def __init__(self, module: nn.Module, *, optimizer: OptimizerConfig) -> None:
        self.module = module
        self.optimizer: torch.optim.Optimizer
        if isinstance(optimizer, SGDConfig):
            self.optimizer = torch.optim.SGD(
                module.parameters(), lr=1.0, momentum=optimizer.momentum, weight_decay=optimizer.weight_decay
            )
        elif isinstance(optimizer, AdamWConfig):
            matrices = [parameter for parameter in module.parameters() if parameter.ndim > 1]
            vectors = [parameter for parameter in module.parameters() if parameter.ndim == 1]
            self.optimizer = torch.optim.AdamW(
                [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
            )
        else:
            assert isinstance(optimizer, AdamConfig)
            self.optimizer = torch.optim.Adam(module.parameters(), lr=1.0, weight_decay=optimizer.weight_decay)

    def __call__(self, *inputs: Any) -> Any:
        return self.module(*inputs)

    def backward(self, loss: Tensor) -> None:
        torch.autograd.backward(loss)

    def gradient_norm(self) -> Tensor:
        return torch.stack([p.grad.square().sum() for p in self.module.parameters() if p.grad is not None]).sum().sqrt()

    def step(self, *, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        self.module.requires_grad_(False)
        yield
        self.module.requires_grad_(True)


def optimizer_of(case: Case, player: str) -> OptimizerConfig:
    return case.optimizer if player == "encoder" else ADAM


def deepspeed_engines(case: Case, *, seed: int = 0, device: torch.device = CPU) -> dict[str, Any]:
    return {
        name: DeepSpeedEngine(
            module.to(device, memory_format=case.memory_format),  # type: ignore[call-overload]
            optimizer=optimizer_of(case, name),
            config=case.config,
            global_batch_size=BATCH_SIZE,
        )
        for name, module in players(case.game, seed=seed).items()
    }


def pictures(step: int) -> Tensor:
    """Return this rank's part of the batch of a step."""
    whole = torch.randn(BATCH_SIZE, 3, 6, 6, generator=torch.Generator().manual_seed(step))
    return whole.chunk(world_size())[rank()]


def loss_of(engines: Mapping[str, Any], x: Tensor, *, reverses: bool = False) -> Tensor:
    """Return the mean over this rank's samples of two views, two forwards of each module."""
    views = [x, x.flip(3)]
    if "viewmaker" in engines:
        views = [engines["viewmaker"](view) for view in views]
    if reverses:
        views = [reverse_gradient(view, 0.5) for view in views]
    z_a, z_b = (engines["encoder"](view) for view in views)
    spread = (z_a.square().sum(1) - 1).square() + (z_b.square().sum(1) - 1).square()
    loss: Tensor = ((z_a - z_b).square().sum(1) + spread).mean()
    return loss


def play(engines: Mapping[str, Any], game: Game, *, first: int = 0, last: int = NUM_STEPS) -> tuple[Tensor, Tensor]:
    """Take steps `first` to `last`; return this rank's losses and the lengths of the encoder's gradient."""
    losses, norms = [], []
    encoder, viewmaker = engines["encoder"], engines["encoder" if game == "encoder" else "viewmaker"]
    device = next(encoder.module.parameters()).device
    for step in range(first, last):
        x = pictures(step).to(device)
        with viewmaker.frozen() if game == "alternating" else ExitStack():
            loss = loss_of(engines, x, reverses=game == "simultaneous")
            encoder.backward(loss)
        losses.append(loss.detach())
        norms.append(encoder.gradient_norm())
        encoder.step(learning_rate=RATES["encoder"] / (1 + step / 10))
        if game == "alternating":
            with encoder.frozen():
                viewmaker.backward(-0.5 * loss_of(engines, x))
        if game != "encoder":
            viewmaker.step(learning_rate=RATES["viewmaker"])
    return torch.stack(losses).cpu(), torch.stack(norms).cpu()


def states_of(engines: Mapping[str, Any]) -> dict[str, tuple[State, State]]:
    return {
        name: tuple({key: value.to("cpu", copy=True) for key, value in state.items()} for state in both)  # type: ignore[misc]
        for name, engine in engines.items()
        for both in [(engine.module_state(), engine.optimizer_state())]
    }


def same_bits(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_bits(a[key], b[key]) for key in a)
    return len(a) == len(b) and all(same_bits(*pair) for pair in zip(a, b, strict=True))


def train_on_rank(case: Case, device: torch.device = CPU) -> dict[str, Any]:
    engines = deepspeed_engines(case, device=device)
    losses, norms = play(engines, case.game)
    return {"losses": losses, "norms": norms, "states": states_of(engines)}


def numbers_kept(case: Case) -> dict[str, int]:
    """Return how many numbers of momentum this rank keeps, and how many there are."""
    (engine,) = deepspeed_engines(case).values()
    kept = sum(value.numel() for state in engine._optimizer.state.values() for value in state.values())
    return {"kept": kept, "all": sum(parameter.numel() for parameter in Encoder().parameters())}


def exchange(stages: tuple[Case, ...]) -> dict[str, Any]:
    """Take three steps of the first case; load that state into each of the others, and take three steps more."""
    source = deepspeed_engines(stages[0])
    play(source, stages[0].game, last=3)
    saved = states_of(source)
    play(source, stages[0].game, first=3, last=6)
    result: dict[str, Any] = {"saved": saved, "goes_on": states_of(source), "taken_up": {}, "ends": {}}
    for case in stages[1:]:
        engines = deepspeed_engines(case, seed=1)
        play(engines, case.game, last=2)
        for name, engine in engines.items():
            engine.load(*saved[name])
        result["taken_up"][case.name] = states_of(engines)
        play(engines, case.game, first=3, last=6)
        result["ends"][case.name] = states_of(engines)
    return result


def skip_a_step(case: Case) -> dict[str, Any]:
    """Return whether a skipped step changes nothing, and the steps after it equal the steps of a run without it."""
    result: dict[str, Any] = {}
    plain, skipping = deepspeed_engines(case), deepspeed_engines(case)
    play(plain, case.game, last=4)
    play(skipping, case.game, last=2)
    before = states_of(skipping)
    skipping["encoder"].backward(loss_of(skipping, pictures(9) * torch.nan))
    result["norm"] = skipping["encoder"].gradient_norm()
    for player, engine in skipping.items():
        engine.step(learning_rate=RATES[player], skip=torch.tensor(True))
    result["stays"] = same_bits(before, states_of(skipping))
    result["no_gradient_left"] = all(p.grad is None for e in skipping.values() for p in e.module.parameters())
    for step in (2, 3):
        skipping["encoder"].backward(loss_of(skipping, pictures(step), reverses=case.game != "encoder"))
        for player, engine in skipping.items():
            rate = RATES[player] / (1 + step / 10) if player == "encoder" else RATES[player]
            engine.step(learning_rate=rate, skip=torch.tensor(False))
    result["goes_on"] = same_bits(states_of(plain), states_of(skipping))
    return result


EXCHANGED = tuple(Case("encoder", stage, ADAMW) for stage in (2, 1, 3))
SKIPPED = [Case("simultaneous", 1), Case("encoder", 3), Case("encoder", 2, ADAM, offload=True)]
FUSED = Case("simultaneous", 2)


@dataclass(frozen=True)
class RealRun:
    """A run as the loop trains it, and the stage that is to train it."""

    config: RunConfig
    stage: Literal[1, 2, 3]


IN_PARTS = ["memory.micro_batches=2", "memory.encoder_checkpointing=whole"]
REAL_RUNS: dict[str, tuple[str, list[str], Literal[1, 2, 3]]] = {
    "simultaneous": ("debug:viewmaker", IN_PARTS, 2),
    "alternating": ("debug:viewmaker", ["adversary.update=alternating", CONVNET], 1),
    "predictor": ("debug:viewmaker", ["objective.kind=simsiam", "adversary.freeze_step=2", CONVNET], 2),
    "in_pieces": ("debug:image", IN_PARTS, 3),
}


def real_steps(run: RealRun, *, engine: Literal["ddp", "deepspeed"], device: torch.device = CPU) -> dict[str, Any]:
    """Take the first steps of a run on its data, as the loop does."""
    engines = {"ddp": DDPConfig(), "deepspeed": DeepSpeedConfig(zero_stage=run.stage)}
    config = run.config.model_copy(update={"engine": engines[engine], "global_batch_size": 16})
    modules = build_modules(config).to(device)
    objective = build_run_objective(config, modules.encoder, num_samples=40, device=device)
    trained = modules.trained_modules
    if any(parameter.requires_grad for parameter in objective.parameters()):
        trained["objective"] = objective
    start = {
        name: {key: value.to("cpu", copy=True) for key, value in module.state_dict().items()}
        for name, module in trained.items()
    }
    training = assemble(config, modules, objective)
    stream = open_stream(config.data, global_batch_size=16, seed=0, end_step=3, device=device)
    rates = {"encoder": 0.01, "objective": 0.01, "viewmaker": 1e-4}
    losses = [training.step(batch, learning_rates=rates).metrics["train/loss"] for batch in stream]
    return {"losses": torch.stack(losses).cpu(), "states": states_of(training.engines), "start": start}


@contextmanager
def fused_kernels() -> Iterator[None]:
    """Let engines use the fused kernels of a GPU's optimizers, which exist for the CPU as well."""

    def fused(config: OptimizerConfig, module: nn.Module) -> torch.optim.Optimizer:
        optimizer = build_optimizer(config, module)
        optimizer.defaults["fused"] = True
        for group in optimizer.param_groups:
            group |= {"fused": True, "foreach": False}
        return optimizer

    with mock.patch.object(deepspeed_engine, "build_optimizer", fused):
        yield


def skip_fused() -> dict[str, Any]:
    with fused_kernels():
        return skip_a_step(FUSED)


def do_all(real_runs: dict[str, RealRun]) -> dict[str, Any]:
    """Run all cases of two ranks in one call: importing DeepSpeed takes longer than a case."""
    return {
        "trained": {name: train_on_rank(case) for name, case in CASES.items()},
        "kept": {stage: numbers_kept(Case("encoder", stage)) for stage in (1, 2, 3)},
        "exchanged": exchange(EXCHANGED),
        "exchanged_from_3": exchange((EXCHANGED[2], EXCHANGED[0])),
        "skipped": {case.name: skip_a_step(case) for case in SKIPPED} | {"fused": skip_fused()},
        "real": {name: real_steps(run, engine="deepspeed") for name, run in real_runs.items()},
        "real_ddp": {name: real_steps(run, engine="ddp") for name, run in real_runs.items()},
    }


@pytest.fixture(scope="module")
def real_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RealRun]:
    data = write_tiny_pair(tmp_path_factory.mktemp("data"), num_train=40, num_test=20)
    given = [f"data.{split}_dir={data / split}" for split in ("train", "test")]
    given += ["data.num_workers=0", "global_batch_size=16"]
    return {
        name: RealRun(resolve_recipe(recipe, [*given, *overrides]), stage)
        for name, (recipe, overrides, stage) in REAL_RUNS.items()
    }


@pytest.fixture(scope="module")
def ranks(real_runs: dict[str, RealRun]) -> list[dict[str, Any]]:
    return run_ranks(do_all, 2, real_runs, timeout_s=300)


def reference(case: Case) -> dict[str, Any]:
    engines = {name: Plain(module, optimizer=optimizer_of(case, name)) for name, module in players(case.game).items()}
    losses, norms = play(engines, case.game)
    optimizer_states = {
        name: {
            f"{key}/{path}": value
            for path, parameter in engine.module.named_parameters()
            for key, value in engine.optimizer.state[parameter].items()
        }
        for name, engine in engines.items()
    }
    return {
        "losses": losses,
        "norms": norms,
        "states": {name: (engine.module.state_dict(), optimizer_states[name]) for name, engine in engines.items()},
    }


def assert_follows(found: State, expected: State, start: Mapping[str, Tensor], *, rtol: float) -> None:
    """Compare each tensor, up to a share of its distance from `start`."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        way = (tensor - start.get(name, torch.zeros_like(tensor))).norm()
        assert way > 0, name
        assert (found[name] - tensor).norm() <= rtol * way, name


def assert_follow_one_process(found: list[dict[str, Any]], case: Case) -> None:
    """Compare what the ranks of a case return with plain torch in one process."""
    expected = reference(case)
    together = torch.stack([result["losses"] for result in found]).mean(0)
    assert (expected["losses"] - expected["losses"][0]).abs().max() > 0.1  # the run moved
    torch.testing.assert_close(together, expected["losses"], rtol=1e-5, atol=0)
    for result in found:
        torch.testing.assert_close(result["norms"], expected["norms"], rtol=1e-5, atol=0)
        start = {player: module.state_dict() for player, module in players(case.game).items()}
        for player, (module_state, optimizer_state) in expected["states"].items():
            found_module, found_optimizer = result["states"][player]
            assert_follows(found_module, module_state, start[player], rtol=1e-4)
            assert_follows(found_optimizer, optimizer_state, {}, rtol=1e-4)


@pytest.mark.ranks
@pytest.mark.parametrize("name", CASES)
def test_ranks_follow_one_plain_process(name: str, ranks: list[dict[str, Any]]) -> None:
    """10 steps in float32 on two ranks: losses, gradient lengths, both players' parameters and optimizer states."""
    assert_follow_one_process([result["trained"][name] for result in ranks], CASES[name])


@pytest.mark.ranks
def test_all_stages_cut_the_state(ranks: list[dict[str, Any]]) -> None:
    for stage in (1, 2, 3):
        kept = [result["kept"][stage]["kept"] for result in ranks]
        total = ranks[0]["kept"][stage]["all"]
        assert sum(kept) - total in range(16)  # of padding
        assert max(kept) < 0.51 * total


@pytest.mark.ranks
@pytest.mark.parametrize("way", ["exchanged", "exchanged_from_3"])
def test_state_goes_from_stage_to_stage(way: str, ranks: list[dict[str, Any]]) -> None:
    """Bit-equal where it is taken up, and training goes on as if nothing had been; the master copies move as well."""
    start = {"encoder": players("encoder")["encoder"].state_dict()}
    for result in ranks:
        saved, goes_on = result[way]["saved"], result[way]["goes_on"]
        assert same_bits(saved, ranks[0][way]["saved"])
        assert set(saved["encoder"][1]) >= {"step/first.weight", "exp_avg/first.weight", "exp_avg_sq/second.bias"}
        for name, taken_up in result[way]["taken_up"].items():
            assert same_bits(taken_up, saved), name
        for ends in result[way]["ends"].values():
            for both, expected in zip(ends["encoder"], goes_on["encoder"], strict=True):
                assert_follows(both, expected, start["encoder"], rtol=1e-5)


@pytest.mark.ranks
def test_state_goes_to_ddp_in_one_process_and_back(ranks: list[dict[str, Any]]) -> None:
    saved, goes_on = (ranks[0]["exchanged"][when]["encoder"] for when in ("saved", "goes_on"))
    engine = DDPEngine(players("encoder", seed=1)["encoder"], optimizer=ADAMW)
    engine.load(*saved)
    assert same_bits(states_of({"encoder": engine})["encoder"], saved)
    play({"encoder": engine}, "encoder", first=3, last=6)
    start = players("encoder")["encoder"].state_dict()
    for found, expected in zip(states_of({"encoder": engine})["encoder"], goes_on, strict=True):
        assert_follows(found, expected, start, rtol=1e-5)
    for result in run_ranks(take_up, 1, states_of({"encoder": engine})["encoder"]):
        assert result == dict.fromkeys((1, 2, 3), True)


def take_up(saved: tuple[State, State]) -> dict[int, bool]:
    """Load a state in one process without a group, and compare what the engine returns."""
    torch.distributed.destroy_process_group()
    result: dict[int, bool] = {}
    for case in EXCHANGED:
        engines = deepspeed_engines(case, seed=1)
        engines["encoder"].load(*saved)
        result[case.stage] = same_bits(states_of(engines)["encoder"], saved)
        odd: list[State] = [{}, saved[1] | {"exp_avg/first.weight": torch.zeros(3)}]
        odd.append(saved[1] | {"step/first.weight": torch.tensor(99.0)})  # there is one count for a group of parameters
        for state in odd:
            with pytest.raises(RuntimeError, match="does not fit"):
                engines["encoder"].load(saved[0], state)
    return result


@pytest.mark.ranks
@pytest.mark.parametrize("name", [*(case.name for case in SKIPPED), "fused"])
def test_a_skipped_step_leaves_no_trace(name: str, ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        found = dict(result["skipped"][name])
        assert not found.pop("norm").isfinite()
        assert found == {"stays": True, "no_gradient_left": True, "goes_on": True}


@pytest.mark.ranks
@pytest.mark.parametrize("name", REAL_RUNS)
def test_a_real_run_ends_in_the_bits_of_ddp(
    name: str, real_runs: dict[str, RealRun], ranks: list[dict[str, Any]]
) -> None:
    """On two ranks, where a sum has only one order. Its losses equal the losses of one process.

    The runs have batch norm and contrast over the ranks, a viewmaker, a predictor, and micro batches.
    """
    alone = real_steps(real_runs[name], engine="ddp")
    found = torch.stack([result["real"][name]["losses"] for result in ranks]).mean(0)
    torch.testing.assert_close(found, alone["losses"], rtol=1e-4, atol=1e-5)  # one process may run several threads
    for result in ranks:
        states = result["real"][name]["states"]
        assert same_bits(states, result["real_ddp"][name]["states"])
        assert not same_bits(states["encoder"][0], alone["start"]["encoder"])


@pytest.mark.parametrize(
    ("recipe", "stage", "change", "words"),
    [
        ("debug:viewmaker", 3, [], "zero_stage 3 trains only one module.*engine.zero_stage=1 or 2"),
        ("debug:image", 3, ["objective.kind=moco", "objective.queue_size=64"], "momentum copy.*engine.zero_stage=2"),
        ("debug:image", 3, ["objective.kind=simsiam"], r"objective has trained layers.*engine\.zero_stage=2"),
        ("debug:image", 2, ["precision=float16"], "precision float16.*engine.kind=ddp"),
        ("debug:image", 1, ["optimizer.kind=lars"], "optimizer lars.*whole layers"),
    ],
)
def test_what_it_cannot_train_is_refused_in_one_sentence(
    recipe: str, stage: int, change: list[str], words: str
) -> None:
    if "optimizer.kind=lars" in change:
        pytest.importorskip("timm")
    with pytest.raises(UserError, match=words) as error:
        resolve_recipe(recipe, ["engine.kind=deepspeed", f"engine.zero_stage={stage}", *change])
    assert "\n" not in str(error.value)


def test_without_deepspeed_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install -e '\.\[deepspeed\]'"):
        DeepSpeedConfig().check(resolve_recipe("debug:image"))
