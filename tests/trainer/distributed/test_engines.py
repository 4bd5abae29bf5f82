"""Under DeepSpeed and FSDP a run follows one plain process, and its state goes to and from every other engine.

`tests/trainer/test_exactness.py` and `tests/trainer/test_trajectory.py` compare whole steps and runs of FSDP.
"""

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
from tests.old_versions import HAS_FSDP, needs_fsdp
from tests.small_encoder import CONVNET
from tests.tiny_data import write_tiny_pair
from trainer.adversary import reverse_gradient
from trainer.build import assemble
from trainer.config import RunConfig
from trainer.data import open_stream
from trainer.distributed.collectives import rank, world_size
from trainer.distributed.engines import deepspeed_engine, fsdp_engine
from trainer.distributed.engines.ddp_engine import DDPConfig, DDPEngine
from trainer.distributed.engines.deepspeed_engine import DeepSpeedConfig
from trainer.distributed.engines.engine import BaseEngineConfig, EngineInputs
from trainer.distributed.engines.fsdp_engine import FSDPConfig, FSDPEngine
from trainer.distributed.environment import destroy_process_group
from trainer.modules import build_modules, build_run_objective
from trainer.optim.optimizers import AdamConfig, AdamWConfig, OptimizerConfig, SGDConfig, build_optimizer

CPU = torch.device("cpu")
BATCH_SIZE = 8
NUM_STEPS = 5
RATES = {"encoder": 0.02, "viewmaker": 2e-3}
SGD = SGDConfig(momentum=0.9, weight_decay=1e-4)
ADAM = AdamConfig(weight_decay=1e-3)
ADAMW = AdamWConfig(weight_decay=0.05)  # two groups of parameters
ZERO_1, ZERO_2, ZERO_3 = (DeepSpeedConfig(zero_stage=stage) for stage in (1, 2, 3))
FSDP = FSDPConfig()
Game = Literal["encoder", "simultaneous", "alternating"]
State = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A game, the engine that trains it, and the optimizer of its encoder; a viewmaker has Adam."""

    game: Game
    engine: BaseEngineConfig
    optimizer: OptimizerConfig = SGD
    memory_format: torch.memory_format = torch.contiguous_format


CASES = {
    "zero_1": Case("simultaneous", ZERO_1),
    "zero_2-channels_last": Case("alternating", ZERO_2, memory_format=torch.channels_last),
    "zero_2": Case("simultaneous", ZERO_2, ADAM),
    "zero_3": Case("encoder", ZERO_3, ADAMW),
    "fsdp": Case("alternating", FSDP, ADAMW),
}


class Encoder(nn.Module):
    """Smooth, so that rounding stays rounding; odd sizes, so that pieces need padding; one layer that stage 3 cuts.

    One rank has nothing of `shift`; `scale` is not trained.
    """

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 5, 3, padding=1)
        self.first = nn.Linear(5 * 6 * 6, 61)
        self.second = nn.Linear(61, 7)
        self.shift = nn.Parameter(torch.zeros(1))
        self.scale = nn.Parameter(torch.ones(6), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.tanh(self.convolution(x * self.scale)).flatten(1)
        z: Tensor = self.second(torch.tanh(self.first(inner))) + self.shift
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
        self.optimizer = build_optimizer(optimizer, module)

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
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
        for parameter in trained:
            parameter.requires_grad_(True)


def optimizer_of(case: Case, player: str) -> OptimizerConfig:
    return case.optimizer if player == "encoder" else ADAM


def engines_of(case: Case, *, seed: int = 0, device: torch.device = CPU) -> dict[str, Any]:
    engines = {}
    for name, module in players(case.game, seed=seed).items():
        module.to(device, memory_format=case.memory_format)  # type: ignore[call-overload]
        blocks = (module.first, module.second) if isinstance(module, Encoder) else ()
        given = EngineInputs(optimizer_of(case, name), BATCH_SIZE, blocks)
        engines[name] = case.engine.of_module(name).build(module, given)
    return engines


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
    engines = engines_of(case, device=device)
    losses, norms = play(engines, case.game)
    return {"losses": losses, "norms": norms, "states": states_of(engines)}


def numbers_kept(engine: BaseEngineConfig) -> int:
    """Return how many numbers of momentum this rank keeps."""
    (built,) = engines_of(Case("encoder", engine)).values()
    return sum(value.numel() for state in built._optimizer.state.values() for value in state.values())


def exchange(cases: tuple[Case, ...]) -> dict[str, Any]:
    """Take two steps of the first case; load that state into each of the others, and take two steps more."""
    source = engines_of(cases[0])
    play(source, cases[0].game, last=2)
    saved = states_of(source)
    play(source, cases[0].game, first=2, last=4)
    result: dict[str, Any] = {"saved": saved, "goes_on": states_of(source), "taken_up": [], "ends": []}
    for case in cases[1:]:
        engines = engines_of(case, seed=1)
        play(engines, case.game, last=1)
        for name, engine in engines.items():
            engine.load(*saved[name])
        result["taken_up"].append(states_of(engines))
        play(engines, case.game, first=2, last=4)
        result["ends"].append(states_of(engines))
    return result


def skip_a_step(case: Case) -> dict[str, Any]:
    """Return whether a skipped step changes nothing, and the steps after it equal the steps of a run without it."""
    result: dict[str, Any] = {}
    plain, skipping = engines_of(case), engines_of(case)
    play(plain, case.game, last=3)
    play(skipping, case.game, last=1)
    before = states_of(skipping)
    skipping["encoder"].backward(loss_of(skipping, pictures(9) * torch.nan))
    result["norm"] = skipping["encoder"].gradient_norm()
    for player, engine in skipping.items():
        engine.step(learning_rate=RATES[player], skip=torch.tensor(True))
    result["stays"] = same_bits(before, states_of(skipping))
    result["no_gradient_left"] = all(p.grad is None for e in skipping.values() for p in e.module.parameters())
    for step in (1, 2):
        skipping["encoder"].backward(loss_of(skipping, pictures(step), reverses=case.game != "encoder"))
        for player, engine in skipping.items():
            rate = RATES[player] / (1 + step / 10) if player == "encoder" else RATES[player]
            engine.step(learning_rate=rate, skip=torch.tensor(False))
    result["goes_on"] = same_bits(states_of(plain), states_of(skipping))
    return result


EXCHANGED = {
    kind: tuple(Case("encoder", engine, ADAMW) for engine in engines)
    for kind, engines in {
        "zero_2": (ZERO_2, ZERO_1, ZERO_3),
        "zero_3": (ZERO_3, FSDP),
        "fsdp": (FSDP, ZERO_2),
        "ddp": (DDPConfig(), ZERO_1),
    }.items()
}
SKIPPED = {
    "zero_2": Case("encoder", ZERO_2, ADAM),
    "zero_3": Case("encoder", ZERO_3),
    "fsdp": Case("simultaneous", FSDP),
}


def take_up(saved: tuple[State, State]) -> list[bool]:
    """Load a state in one process without a group, and compare what the engine returns."""
    destroy_process_group()
    result = []
    for case in EXCHANGED["zero_2"]:
        engines = engines_of(case, seed=1)
        engines["encoder"].load(*saved)
        result.append(same_bits(states_of(engines)["encoder"], saved))
        odd: list[State] = [{}, saved[1] | {"exp_avg/first.weight": torch.zeros(3)}]
        odd.append(saved[1] | {"step/first.weight": torch.tensor(99.0)})  # there is one count for a group of parameters
        for state in odd:
            with pytest.raises(RuntimeError, match="does not fit"):
                engines["encoder"].load(saved[0], state)
    return result


@dataclass(frozen=True)
class RealRun:
    """A run as the loop trains it, and the engine that is to train it."""

    config: RunConfig
    engine: BaseEngineConfig


IN_PARTS = ["memory.micro_batches=2", "memory.encoder_checkpointing=whole"]
PREDICTOR = ["objective.kind=simsiam", "adversary.freeze_step=2"]
REAL_RUNS: dict[str, tuple[str, list[str], BaseEngineConfig]] = {
    "simultaneous": ("debug:viewmaker", [*IN_PARTS, CONVNET], ZERO_2),
    "alternating": ("debug:viewmaker", ["adversary.update=alternating", *PREDICTOR, CONVNET], ZERO_1),
    "in_pieces": ("debug:image", [*IN_PARTS, CONVNET], ZERO_3),
    "fsdp": ("debug:viewmaker", [*PREDICTOR, CONVNET], FSDP),
}


def configure_real_runs(data: Any, *overrides: str) -> dict[str, RealRun]:
    given = [f"data.{split}_dir={data / split}" for split in ("train", "test")]
    given += ["data.num_workers=0", "global_batch_size=16", *overrides]
    return {
        name: RealRun(resolve_recipe(recipe, [*given, *of_run]), engine)
        for name, (recipe, of_run, engine) in REAL_RUNS.items()
    }


def real_steps(run: RealRun, *, is_ddp: bool, device: torch.device = CPU) -> dict[str, Any]:
    """Take the first steps of a run on its data, as the loop does."""
    config = run.config.model_copy(update={"engine": DDPConfig() if is_ddp else run.engine})
    modules = build_modules(config).to(device)
    objective = build_run_objective(config, modules.encoder, num_samples=40, device=device)
    trained = modules.trained_modules
    if any(parameter.requires_grad for parameter in objective.parameters()):
        trained["objective"] = objective
    start = {
        name: {key: value.to("cpu", copy=True) for key, value in module.state_dict().items()}
        for name, module in trained.items()
    }
    if is_ddp:  # the engine makes the weights that it trains contiguous; for others oneDNN rounds otherwise
        for name in trained if run.engine != FSDP else ("encoder",):
            trained[name].to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    training = assemble(config, modules, objective)
    stream = open_stream(config.data, global_batch_size=16, seed=0, end_step=3, device=device)
    rates = {"encoder": 0.01, "objective": 0.01, "viewmaker": 1e-4}
    losses = [training.step(batch, learning_rates=rates).metrics["train/loss"] for batch in stream]
    return {"losses": torch.stack(losses).cpu(), "states": states_of(training.engines), "start": start}


def skip_fused() -> dict[str, Any]:
    """Skip a step with the fused kernels of a GPU's optimizers, which exist for the CPU as well."""

    def fused(config: OptimizerConfig, module: nn.Module) -> torch.optim.Optimizer:
        optimizer = build_optimizer(config, module)
        optimizer.defaults["fused"] = True
        for group in optimizer.param_groups:
            group |= {"fused": True, "foreach": False}
        return optimizer

    with mock.patch.object(deepspeed_engine, "build_optimizer", fused):
        return skip_a_step(Case("simultaneous", ZERO_2))


def do_all(real_runs: dict[str, RealRun]) -> dict[str, Any]:
    """Run all cases of two ranks in one call: importing DeepSpeed takes longer than a case."""
    results: dict[str, Any] = {
        "trained": {name: train_on_rank(case) for name, case in CASES.items()},
        "kept": [numbers_kept(engine) for engine in (ZERO_1, ZERO_2, ZERO_3, FSDP)],
        "exchanged": {name: exchange(cases) for name, cases in EXCHANGED.items()},
        "skipped": {name: skip_a_step(case) for name, case in SKIPPED.items()} | {"fused": skip_fused()},
        "real": {name: real_steps(run, is_ddp=False) for name, run in real_runs.items()},
        "real_ddp": {name: real_steps(run, is_ddp=True) for name, run in real_runs.items()},
        "fsdp": in_pieces(),
    }
    return results | {"alone": take_up(results["exchanged"]["fsdp"]["saved"]["encoder"])}


@pytest.fixture(scope="module")
def real_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RealRun]:
    return configure_real_runs(write_tiny_pair(tmp_path_factory.mktemp("data"), num_train=40, num_test=20))


@pytest.fixture(scope="module")
def ranks(real_runs: dict[str, RealRun]) -> list[dict[str, Any]]:
    if not HAS_FSDP:
        pytest.skip("FSDP of torch before 2.11 gives wrong gradients")
    return run_ranks(do_all, 2, real_runs, timeout_s=300)


def reference(case: Case) -> dict[str, Any]:
    engines = {name: Plain(module, optimizer=optimizer_of(case, name)) for name, module in players(case.game).items()}
    losses, norms = play(engines, case.game)
    states = {}
    for name, engine in engines.items():
        optimizer_state = {
            f"{key}/{path}": value
            for path, parameter in engine.module.named_parameters()
            for key, value in engine.optimizer.state[parameter].items()
        }
        states[name] = engine.module.state_dict(), optimizer_state
    return {"losses": losses, "norms": norms, "states": states}


def assert_follows(found: State, expected: State, start: Mapping[str, Tensor], *, rtol: float) -> None:
    """Compare each tensor, up to a share of its distance from `start`."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        way = (tensor - start.get(name, torch.zeros_like(tensor))).norm()
        assert way > 0 or name == "scale", name
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
    """Steps in float32 on two ranks: losses, gradient lengths, both players' parameters and optimizer states."""
    assert_follow_one_process([result["trained"][name] for result in ranks], CASES[name])


@pytest.mark.ranks
def test_each_rank_keeps_half_of_the_state(ranks: list[dict[str, Any]]) -> None:
    total = sum(parameter.numel() for parameter in Encoder().parameters() if parameter.requires_grad)
    for kept in zip(*(result["kept"] for result in ranks), strict=True):
        assert sum(kept) - total in range(16)  # of padding
        assert max(kept) < 0.52 * total


@pytest.mark.ranks
@pytest.mark.parametrize("name", EXCHANGED)
def test_state_goes_from_engine_to_engine(name: str, ranks: list[dict[str, Any]]) -> None:
    """Bit-equal where it is taken up, and training goes on as if nothing had been; the master copies move as well."""
    start = players("encoder")["encoder"].state_dict()
    for result in ranks:
        found = result["exchanged"][name]
        assert same_bits(found["saved"], ranks[0]["exchanged"][name]["saved"])
        assert set(found["saved"]["encoder"][1]) >= {"step/first.weight", "exp_avg/shift", "exp_avg_sq/second.bias"}
        assert all(same_bits(taken_up, found["saved"]) for taken_up in found["taken_up"])
        for ends in found["ends"]:
            for both, expected in zip(ends["encoder"], found["goes_on"]["encoder"], strict=True):
                assert_follows(both, expected, start, rtol=1e-5)


@pytest.mark.ranks
def test_state_goes_to_ddp_in_one_process_and_back(ranks: list[dict[str, Any]]) -> None:
    start = players("encoder")["encoder"].state_dict()
    for kind in ("fsdp", "zero_2"):
        saved, goes_on = (ranks[0]["exchanged"][kind][when]["encoder"] for when in ("saved", "goes_on"))
        engine = DDPEngine(players("encoder", seed=1)["encoder"], optimizer=ADAMW)
        engine.load(*saved)
        assert same_bits(states_of({"encoder": engine})["encoder"], saved)
        play({"encoder": engine}, "encoder", first=2, last=4)
        for found, expected in zip(states_of({"encoder": engine})["encoder"], goes_on, strict=True):
            assert_follows(found, expected, start, rtol=1e-5)
    assert [result["alone"] for result in ranks] == [[True] * 3] * 2


@pytest.mark.ranks
@pytest.mark.parametrize("name", [*SKIPPED, "fused"])
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
    alone = real_steps(real_runs[name], is_ddp=True)
    if real_runs[name].config.precision == "float32":
        found = torch.stack([result["real"][name]["losses"] for result in ranks]).mean(0)
        torch.testing.assert_close(found, alone["losses"], rtol=1e-4, atol=1e-5)
    for result in ranks:
        states = result["real"][name]["states"]
        assert same_bits(states, result["real_ddp"][name]["states"])
        assert not same_bits(states["encoder"][0], alone["start"]["encoder"])


# FSDP alone


def in_pieces() -> dict[str, Any]:
    """Return what a rank keeps between passes, and what becomes of gradients that are huge or passed on."""

    def engine_of() -> FSDPEngine:
        module = players("encoder")["encoder"].double()
        assert isinstance(module, Encoder)
        return FSDPEngine(module, optimizer=SGD, blocks=(module.first, module.second))

    engine, found = engine_of(), dict[str, Any]()
    x = pictures(0).double()
    with torch.no_grad():
        engine(x)
    found["rows"] = {name: value.to_local().shape[0] for name, value in engine._trained.items()}
    found["units"] = [type(unit).__name__ for unit in engine.module.modules() if type(unit).__name__[:4] == "FSDP"]

    once = engine_of()
    once.backward(loss_of({"encoder": once}, x))
    norm = once.gradient_norm()
    once.step(learning_rate=0.1)

    with engine.frozen():
        engine.backward(loss_of({"encoder": engine}, x.requires_grad_()))
    found["frozen"] = x.grad is not None and all(value.grad is None for value in engine.module.parameters())
    engine.backward(1e30 * loss_of({"encoder": engine}, x.detach()))
    torch.testing.assert_close(engine.gradient_norm() / 1e30, norm)
    engine.backward(1e60 * loss_of({"encoder": engine}, x.detach()))
    found["overflows"] = engine.gradient_norm().isinf().item()

    module_state, optimizer_state = states_of({"": once})[""]
    for given, words in (
        ((module_state, {}), "does not fit: momentum_buffer/convolution.bias is in only one"),
        ((module_state, optimizer_state | {"momentum_buffer/shift": torch.zeros(3)}), "shift is \\(3,\\)"),
        (({**module_state, "shift": torch.zeros(3)}, optimizer_state), "size mismatch for shift"),
    ):
        with pytest.raises(RuntimeError, match=words):
            engine.load(*given)
    with_number = Viewmaker()
    with_number.register_parameter("scale", nn.Parameter(torch.ones(())))
    with pytest.raises(UserError, match="cannot cut the parameter scale"):
        FSDPEngine(with_number, optimizer=SGD)
    return found


@pytest.mark.ranks
def test_an_encoder_is_in_pieces_whenever_no_pass_runs(ranks: list[dict[str, Any]]) -> None:
    lengths = {name: len(value) for name, value in Encoder().named_parameters() if value.requires_grad}
    firsts = {name: -(-length // 2) for name, length in lengths.items()}
    assert ranks[0]["fsdp"].pop("rows") == firsts
    assert ranks[1]["fsdp"].pop("rows") == {name: lengths[name] - first for name, first in firsts.items()}
    for result in ranks:
        assert sorted(result["fsdp"].pop("units")) == ["FSDPEncoder", "FSDPLinear", "FSDPLinear"]
        assert result["fsdp"] == {"frozen": True, "overflows": True}


@needs_fsdp
@pytest.mark.ranks
def test_a_restart_on_three_ranks_ends_in_the_same_bits() -> None:
    """`shift` has fewer rows than ranks."""
    case = Case("encoder", FSDP)
    for found in run_ranks(exchange, 3, (case, case)):
        assert same_bits(found["taken_up"], [found["saved"]])
        assert same_bits(found["ends"], [found["goes_on"]])


def test_in_a_single_process_everything_is_trained_by_ddp_and_small_modules_always_are() -> None:
    assert isinstance(FSDP.build(Encoder(), EngineInputs(SGD, BATCH_SIZE)), DDPEngine)
    assert [FSDP.of_module(name).kind for name in ("encoder", "viewmaker", "objective")] == ["fsdp", "ddp", "ddp"]


@pytest.mark.parametrize(
    ("recipe", "change", "words"),
    [
        ("debug:viewmaker", ["engine.zero_stage=3"], "engine.zero_stage=1 or 2"),
        ("debug:image", ["engine.zero_stage=3", "objective={kind: moco, queue_size: 64}"], "momentum copy"),
        ("debug:image", ["engine.zero_stage=3", "objective.kind=simsiam"], "objective has trained layers"),
        ("debug:image", ["precision=float64"], "precision float64.*engine.kind=ddp or fsdp"),
        ("debug:image", ["optimizer={kind: lars}"], "optimizer lars.*engine.kind=ddp"),
        ("debug:image", ["engine.kind=fsdp", "optimizer={kind: lars}"], "optimizer lars.*engine.kind=ddp"),
        ("debug:image", ["engine.kind=fsdp", "compile=both"], "compile=both.*compile=false"),
        ("debug:image", ["engine.kind=fsdp", "probe.online_every_steps=10"], "probe.online_every_steps.*to null"),
    ],
)
def test_what_an_engine_cannot_train_is_refused(recipe: str, change: list[str], words: str) -> None:
    if any("lars" in each for each in change):
        pytest.importorskip("timm")
    with pytest.raises(UserError, match=words):
        resolve_recipe(recipe, ["engine.kind=deepspeed", *change])


def test_fsdp_over_ranks_with_a_torch_that_is_wrong_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsdp_engine, "world_size", lambda: 2)
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)("2.10.0+cu128"))
    with pytest.raises(UserError, match=r"needs torch 2\.11 or newer.*this is 2\.10\.0\+cu128; set engine.kind=ddp"):
        FSDP.build(Encoder(), EngineInputs(SGD, BATCH_SIZE))


def test_without_deepspeed_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install -e '\.\[deepspeed\]'"):
        DeepSpeedConfig().check(resolve_recipe("debug:image"))
