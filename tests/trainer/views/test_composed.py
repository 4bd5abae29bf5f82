"""Sequences and pairs of view policies: planted truths, independent draws, gradients, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from safetensors.torch import load_file
from torch import Tensor, nn

from configs import debug, resolve_recipe
from data_pipeline.audio.log_mel import FSDD
from data_pipeline.core.counter_rng import DrawKeys
from data_pipeline.core.errors import UserError
from tests.gloo import run_ranks
from tests.killed_runs import kill_after
from tests.tiny_data import on_data, write_tiny_pair
from trainer.config import RunConfig
from trainer.modules import build_modules, learned_part
from trainer.run_dir import RunDir
from trainer.train import train
from trainer.views import ViewsConfig, build_view_policy
from trainer.views.channel_dropout import ChannelDropoutConfig
from trainer.views.composed import ByEpochConfig, PairConfig, SequenceConfig
from trainer.views.expert_audio import SpectralConfig, WaveformConfig
from trainer.views.expert_image import NO_VIEWS, ExpertImageConfig
from trainer.views.random_mask import RandomMaskConfig
from trainer.views.viewmaker import ViewmakerConfig

EXPERT = ExpertImageConfig()
CROP = ExpertImageConfig(jitter_probability=0.0, grayscale_probability=0.0, blur_probability=0.0)
FLIP = NO_VIEWS.model_copy(update={"flip_probability": 0.5})
SMALL = ViewmakerConfig(base_width=4, num_res_blocks=1)


def keys(num: int, *, first: int = 0, view: int = 0) -> DrawKeys:
    return DrawKeys(seed=3, epoch=1, index_B=torch.arange(first, first + num), view=view)


def pictures(num: int, *, size: int = 16) -> Tensor:
    return torch.rand(num, 3, size, size, generator=torch.Generator().manual_seed(0))


def build(config: ViewsConfig) -> nn.Module:
    torch.manual_seed(0)
    return build_view_policy(config, image_channels=3)


@pytest.mark.parametrize("view", [0, 3])
@pytest.mark.parametrize(
    "config", [EXPERT, RandomMaskConfig(), ChannelDropoutConfig(), SMALL], ids=lambda config: config.kind
)
def test_a_sequence_of_one_is_that_policy_to_the_bit(config: Any, view: int) -> None:
    x = pictures(6)
    alone, composed = build(config), build(SequenceConfig(parts=(config,)))
    assert torch.equal(composed(x, keys(6, view=view)), alone(x, keys(6, view=view)))


@pytest.mark.parametrize("dropout_rate", [None, 0.5])
def test_a_viewmaker_behind_views_that_change_nothing_is_the_viewmaker_to_the_bit(dropout_rate: float | None) -> None:
    x = pictures(6)
    config = SMALL.model_copy(update={"dropout_rate": dropout_rate})
    expected = build(config)(x, keys(6))
    assert torch.equal(build(SequenceConfig(parts=(NO_VIEWS, config)))(x, keys(6)), expected)
    if dropout_rate is None:
        # The last part draws as it does alone; parts before it draw from keys of their own.
        assert not torch.equal(build(SequenceConfig(parts=(config, NO_VIEWS)))(x, keys(6)), expected)


def test_a_pair_takes_the_first_policy_for_even_views_and_the_second_for_odd_ones() -> None:
    x = pictures(6)
    composed = build(PairConfig(first=EXPERT, second=SMALL))
    expert, viewmaker = build(EXPERT), learned_part(composed)
    for view in (0, 2):
        assert torch.equal(composed(x, keys(6, view=view)), expert(x, keys(6, view=view)))
        assert torch.equal(composed(x, keys(6, view=view + 1)), viewmaker(x, keys(6, view=view + 1)))


def test_both_views_of_a_pair_share_a_draw_that_stands_at_the_same_distance_from_the_end() -> None:
    dropout, mask = ChannelDropoutConfig(), RandomMaskConfig(rescale=False)
    x = torch.full((8, 3, 16, 16), 0.5)
    before_end = PairConfig(first=SequenceConfig(parts=(dropout, FLIP)), second=SequenceConfig(parts=(dropout, CROP)))
    at_end = PairConfig(first=dropout, second=SequenceConfig(parts=(CROP, dropout)))
    for config in (before_end, at_end):
        views_BCHW = build(config)(x, dataclasses.replace(keys(4), step=7).two_views())
        assert len({tuple(view.any(2).any(1).tolist()) for view in views_BCHW}) == 1
    masked = build(PairConfig(first=mask, second=SequenceConfig(parts=(FLIP, mask))))
    assert torch.equal(masked(x, keys(4).two_views())[:4] + masked(x, keys(4).two_views())[4:], x[:4])
    own = ChannelDropoutConfig(shared="view")
    PairConfig(first=own, second=SequenceConfig(parts=(own, FLIP)))
    PairConfig(first=dropout, second=SequenceConfig(parts=(mask, FLIP)))


def test_policies_by_epoch_take_their_epochs_in_their_order() -> None:
    x = pictures(6)
    config = ByEpochConfig(policies=(EXPERT, SMALL, SequenceConfig(parts=(CROP, RandomMaskConfig()))))
    composed = build(config)
    alone = [build(EXPERT), learned_part(composed), build(config.policies[2])]
    for epoch in range(4):
        for view in (0, 1):
            drawn = dataclasses.replace(keys(6, view=view), epoch=epoch)
            assert torch.equal(composed(x, drawn), alone[epoch % 3](x, drawn))
    assert [config.learns_in(epoch) for epoch in range(4)] == [False, True, False, False]


def configure_by_epoch(data: Path, *overrides: str) -> RunConfig:
    """Two epochs of two steps; the viewmaker has the second."""
    views = "views={kind: by_epoch, policies: [{kind: expert_image}, {kind: viewmaker, base_width: 4}]}"
    small = ["global_batch_size=16", "num_epochs=2", "log_every_steps=1"]
    return resolve_recipe("debug:viewmaker", on_data(data, views, *small, *overrides))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_pair(tmp_path_factory.mktemp("data"), num_train=32, num_test=16)


def train_on_rank(config: RunConfig, run_dir: Path) -> list[float]:
    run = RunDir(run_dir)
    train(config, run, device=torch.device("cpu"), command="test")
    return [entry["train/loss"] for entry in run.read_metrics()]


@pytest.mark.process
def test_a_viewmaker_learns_in_its_epochs_only_and_a_run_goes_on_within_one(data: Path, tmp_path: Path) -> None:
    every_step = ["checkpoint_every_steps=1", "keep_checkpoints=5"]
    config = configure_by_epoch(data, "adversary.update=alternating", *every_step)
    run = RunDir(tmp_path / "run")
    losses = train_on_rank(config, run.path)

    def weights(step: int, player: str) -> dict[str, Tensor]:
        return load_file(run.checkpoint(step) / f"{player}.safetensors")

    for step in range(2, 5):
        for player, learns in (("encoder", True), ("viewmaker", step > 2)):
            before, after = weights(step - 1, player), weights(step, player)
            changed = any(not torch.equal(before[name], after[name]) for name in before if name.endswith("weight"))
            assert changed == learns, (step, player)
    whole = {player: weights(4, player) for player in ("encoder", "viewmaker")}

    kill_after(run, 3)
    assert train_on_rank(config, run.path) == losses
    for player, expected in whole.items():
        found = weights(4, player)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.ranks
def test_policies_by_epoch_on_ranks_are_those_of_one_process(data: Path, tmp_path: Path) -> None:
    config = configure_by_epoch(data, "precision=float64")
    whole = train_on_rank(config, tmp_path / "1")
    together = run_ranks(train_on_rank, 2, config, tmp_path / "2")[0]
    assert len(whole) == 4
    np.testing.assert_allclose(together, whole, rtol=1e-9)


def test_the_parts_of_a_sequence_draw_independently() -> None:
    num = 2000
    x = torch.arange(4.0).div(4).expand(num, 3, 4, 4)
    once = build(FLIP)(x, keys(num))
    twice = build(SequenceConfig(parts=(FLIP, FLIP)))(x, keys(num))
    thrice = build(SequenceConfig(parts=(FLIP, FLIP, FLIP)))(x, keys(num))
    flipped = torch.stack([(view[:, 0, 0, 0] > 0.5).double() for view in (once, twice, thrice)])
    # Two equal draws would undo each other. The standard error of a share is 0.011, that of a correlation 0.022.
    assert ((flipped.mean(1) - 0.5).abs() < 0.05).all()
    assert ((torch.corrcoef(flipped) - torch.eye(3)).abs() < 0.08).all()


def test_what_a_viewmaker_changes_does_not_depend_on_the_crop_before_it() -> None:
    """Both draw under the same purpose, so equal keys would bind the size of a crop to whether it is attacked."""
    num = 2000
    crop = CROP.model_copy(update={"flip_probability": 0.0})
    expert = build(SequenceConfig(parts=(crop, NO_VIEWS)))
    viewmaker = build(SequenceConfig(parts=(crop, SMALL.model_copy(update={"dropout_rate": 0.5}))))
    x = torch.linspace(0, 1, 8).expand(num, 3, 8, 8)
    cropped, views = (policy(x, keys(num)) for policy in (expert, viewmaker))
    changed = (views != cropped).flatten(1).any(1).double()
    width = cropped[:, 0, 0, 7] - cropped[:, 0, 0, 0]
    assert abs(changed.mean().item() - 0.5) < 0.05
    assert width.std() > 0.05
    assert abs(torch.corrcoef(torch.stack([changed, width.double()]))[0, 1].item()) < 0.1


def test_the_gradient_of_a_viewmaker_passes_what_is_behind_it() -> None:
    """Crop, flip, grayscale and blur are linear, so a step along any direction gives the gradient exactly."""
    behind = ExpertImageConfig(jitter_probability=0.0, blur_probability=0.8, grayscale_probability=0.5)
    for config in (behind, behind.model_copy(update={"blur": "constant"}), FLIP, RandomMaskConfig()):
        policy = build(SequenceConfig(parts=(config,)))
        draw = torch.Generator().manual_seed(1)
        x, direction, weight = (torch.rand(12, 3, 16, 16, generator=draw) for _ in range(3))
        x.requires_grad_()
        (gradient,) = torch.autograd.grad((weight * policy(x, keys(12))).sum(), x)
        with torch.no_grad():
            change = (weight * (policy(x + direction, keys(12)) - policy(x, keys(12)))).sum()
        assert (gradient * direction).sum().item() == pytest.approx(change.item(), rel=1e-4), config
        # The forward pass is the same with and without a gradient.
        assert torch.equal(policy(x, keys(12)).detach(), policy(x.detach(), keys(12)))


def test_a_viewmaker_gets_the_gradient_of_what_it_saw_behind_a_crop() -> None:
    x, weight = pictures(6), torch.rand(6, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    composed = build(SequenceConfig(parts=(CROP, SMALL)))
    viewmaker = learned_part(composed)
    cropped = build(SequenceConfig(parts=(CROP, NO_VIEWS)))(x, keys(6))
    views = [composed(x, keys(6)), viewmaker(cropped, keys(6))]
    assert torch.equal(*views)
    parameters = list(viewmaker.parameters())
    ours, expected = (torch.autograd.grad((weight * view).sum(), parameters) for view in views)
    assert all(torch.equal(*both) for both in zip(ours, expected, strict=True))
    assert any(gradient.abs().max() > 0 for gradient in ours)


@pytest.mark.parametrize(
    "config",
    [
        SequenceConfig(parts=(EXPERT, SMALL)),
        PairConfig(first=EXPERT, second=SMALL),
        PairConfig(first=SequenceConfig(parts=(CROP, SMALL)), second=RandomMaskConfig()),
        ByEpochConfig(policies=(EXPERT, SequenceConfig(parts=(CROP, SMALL)))),
    ],
    ids=["sequence", "pair", "both", "by_epoch"],
)
def test_both_views_in_one_call_are_those_of_two_calls(config: Any) -> None:
    policy, x = build(config), pictures(6)
    for first in (0, 2):
        together = policy(torch.cat([x, x]), keys(6, view=first).two_views())
        apart = torch.cat([policy(x, keys(6, view=first)), policy(x, keys(6, view=first + 1))])
        torch.testing.assert_close(together, apart, rtol=0, atol=1e-6)


def test_a_composition_with_a_viewmaker_is_the_trained_module() -> None:
    plain = build_modules(debug.viewmaker())
    parts = "parts: [{kind: expert_image}, {kind: viewmaker, base_width: 4, num_res_blocks: 1}]"
    settings = [f"views={{kind: sequence, {parts}}}", "memory.viewmaker_checkpointing=2"]
    composed = build_modules(resolve_recipe("debug:viewmaker", settings))
    assert composed.trained_modules.keys() == plain.trained_modules.keys() == {"encoder", "viewmaker"}
    ours, expected = (modules.trained_modules["viewmaker"].state_dict() for modules in (composed, plain))
    assert all(torch.equal(ours[f"parts.1.{name}"], tensor) for name, tensor in expected.items())
    assert learned_part(composed.view_policy).checkpointing == 2
    assert (
        build_modules(resolve_recipe("debug:image", ["views={kind: sequence, parts: [{kind: random_mask}]}"])).viewmaker
        is None
    )


def test_a_mask_protects_the_object_before_a_crop() -> None:
    masked = ViewmakerConfig(base_width=4, num_res_blocks=1, mask="box")
    policy = build(SequenceConfig(parts=(masked, NO_VIEWS)))
    x, masks = pictures(3), torch.zeros(3, 16, 16, dtype=torch.uint8)
    masks[:, 4:9, 2:7] = 255
    views = policy(x, keys(3), masks)
    assert torch.equal(views[:, :, 4:9, 2:7], x[:, :, 4:9, 2:7])
    assert not torch.equal(views, x)
    with pytest.raises(ValueError, match="have no masks of their objects"):
        policy(x, keys(3))


MASK = {"kind": "random_mask", "rescale": False}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"kind": "sequence", "parts": [{"kind": "viewmaker"}, {"kind": "viewmaker"}]},
            'views of kind "sequence" hold 2 viewmakers, but a run trains one; leave one',
        ),
        (
            {"kind": "sequence", "parts": [{"kind": "expert_image"}, {"kind": "spectral"}]},
            r'views\.parts\[1\] has kind "spectral", which turns sounds into spectrograms',
        ),
        (
            {"kind": "sequence", "parts": [{"kind": "viewmaker"}, {"kind": "expert_image"}]},
            r"views\.parts\[1\] jitters colours behind a viewmaker",
        ),
        (
            {"kind": "sequence", "parts": [{"kind": "expert_image"}, {"kind": "viewmaker", "mask": "box"}]},
            r"views\.parts\[1\] has mask=box, which knows where the object was before the crop or flip",
        ),
        (
            {"kind": "sequence", "parts": [{"kind": "random_mask"}, {"kind": "viewmaker"}]},
            "a random mask before it doubles them; set its rescale=false",
        ),
        (
            {"kind": "pair", "first": MASK, "second": {"kind": "sequence", "parts": [MASK, {"kind": "expert_image"}]}},
            'hold a part of kind "random_mask", whose draw the two views share only if as many',
        ),
    ],
)
def test_compositions_that_cannot_work_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TypeAdapter(ViewsConfig).validate_python(config)


@pytest.mark.parametrize(
    "objective",
    ["{kind: instance_discrimination, num_negatives: 5}", "{kind: moco, queue_size: 64, direction: one_way}"],
)
@pytest.mark.parametrize("member", ["{kind: viewmaker}", "{kind: sequence, parts: [{kind: viewmaker}]}"])
def test_a_viewmaker_of_a_view_that_is_not_trained_is_refused(member: str, objective: str) -> None:
    def resolve(first: str, second: str, objective: str) -> None:
        views = f"views={{kind: pair, first: {first}, second: {second}}}"
        resolve_recipe("debug:viewmaker", [views, f"objective={objective}"])

    with pytest.raises(UserError, match=r"views\.second holds the viewmaker.*put it into views\.first") as raised:
        resolve("{kind: expert_image}", member, objective)
    assert "\n" not in str(raised.value)
    resolve(member, "{kind: expert_image}", objective)
    resolve("{kind: expert_image}", member, "{kind: nt_xent}")


def test_views_and_the_settings_beside_them_are_checked_together() -> None:
    part = "{kind: expert_image}"
    for recipe, views, said in (
        (
            "debug:viewmaker",
            f"{{kind: sequence, parts: [{part}]}}",
            'views of kind "sequence" take no section `adversary`',
        ),
        ("debug:image", f"{{kind: pair, first: {part}, second: {{kind: viewmaker}}}}", "need section `adversary`"),
        ("debug:image", f"{{kind: by_epoch, policies: [{part}, {part}, {part}]}}", "num_epochs is 2; set num_epochs=3"),
    ):
        with pytest.raises(UserError, match=said):
            resolve_recipe(recipe, [f"views={views}"])


def test_sounds_may_be_paired_but_have_no_sequence() -> None:
    config = PairConfig(first=SpectralConfig(), second=WaveformConfig())
    config.check_medium(FSDD)
    policy = build_view_policy(config, image_channels=1, mel=FSDD)
    sounds = torch.rand(2, FSDD.num_points, generator=torch.Generator().manual_seed(0))
    for view, single in enumerate((config.first, config.second)):
        alone = build_view_policy(single, image_channels=1, mel=FSDD)
        assert torch.equal(policy(sounds, keys(2, view=view)), alone(sounds, keys(2, view=view)))
    sequence = SequenceConfig(parts=(EXPERT,))
    for refused in (sequence, PairConfig(first=sequence, second=EXPERT)):
        with pytest.raises(ValueError, match='kind "sequence" are for pictures, not for sounds'):
            refused.check_medium(FSDD)
    with pytest.raises(ValueError, match='kind "expert_image" are for pictures, not for sounds'):
        PairConfig(first=SpectralConfig(), second=EXPERT).check_medium(FSDD)


def test_the_size_of_pictures_is_checked_for_every_part() -> None:
    config = SequenceConfig(parts=(FLIP, SMALL))
    config.check_image_size(height=16, width=16)
    config.check_image_size(height=16, width=20)
    with pytest.raises(ValueError, match="multiples of 4"):
        PairConfig(first=FLIP, second=config).check_image_size(height=18, width=18)
    assert config.is_learned
    assert not PairConfig(first=FLIP, second=FLIP).is_learned
    assert not PairConfig(first=FLIP, second=RandomMaskConfig()).is_bounded
    masked = SMALL.model_copy(update={"mask": "box"})
    assert SequenceConfig(parts=(masked, NO_VIEWS)).protects == "views.mask=box"


def test_the_number_of_channels_is_checked_for_every_part() -> None:
    views = "{kind: pair, first: {kind: random_mask}, second: {kind: sequence, parts: [{kind: expert_image}]}}"
    config = resolve_recipe("debug:image", [f"views={views}"])
    config.views.check_channels(3)
    with pytest.raises(ValueError, match="got 6; set jitter_probability=0"):
        config.views.check_channels(6)
