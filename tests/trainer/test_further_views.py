"""A step with more than two views: what an objective gets of them, and an objective of three views of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import pytest
import torch
from torch import Tensor

from configs import resolve_recipe
from data_pipeline.core.batch import Batch
from data_pipeline.core.errors import UserError
from trainer.build import Training, assemble
from trainer.modules import build_modules
from trainer.objectives import BaseObjectiveConfig, Objective, ObjectiveInputs, ObjectiveOutput, ViewPair

CPU = torch.device("cpu")


class Spread(Objective):
    """The mean squared distance of every view's embedding from their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[ViewPair, Sequence[Tensor]]] = []

    def forward(self, z_a_BD: Tensor, z_b_BD: Tensor, pair: ViewPair, *further_BD: Tensor) -> ObjectiveOutput:
        z_NBD = torch.stack([z_a_BD, z_b_BD, *further_BD])
        self.seen.append((pair, z_NBD.detach().unbind()))
        return ObjectiveOutput((z_NBD - z_NBD.mean(0)).square().mean(), {})


class SpreadConfig(BaseObjectiveConfig):
    """The config of `Spread`."""

    kind: Literal["further_spread"] = "further_spread"
    takes_further_views: ClassVar[bool] = True

    def build(self, given: ObjectiveInputs) -> Spread:
        return Spread()


def batch() -> Batch:
    pictures = torch.randint(0, 256, (8, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return Batch(3, 1, torch.randperm(8), pictures, pictures, None, None, {"base": torch.arange(8)})


MULTI_CROP = "{kind: multi_crop, num_local: 1, local_size: 8}"


def train(*overrides: str, views: str = MULTI_CROP) -> tuple[Training, Spread, dict[str, Tensor]]:
    every = [f"views={views}", "objective.kind=dino", "global_batch_size=8", "precision=float64"]
    config = resolve_recipe("debug:image", [*every, *overrides])
    modules = build_modules(config).to(CPU, torch.float64)
    training = assemble(config, modules, objective := Spread())
    gradients: dict[str, Tensor] = {}
    encoder = modules.encoder
    training.engines["encoder"].step = lambda **_: gradients.update(  # type: ignore[method-assign]
        {name: parameter.grad.clone() for name, parameter in encoder.named_parameters() if parameter.grad is not None}
    )
    torch.manual_seed(0)
    training.step(batch(), learning_rates={"encoder": 0.0})
    return training, objective, gradients


def test_an_objective_of_three_views_gets_each_view_and_its_embedding() -> None:
    training, objective, gradients = train()
    ((pair, z_NBD),) = objective.seen
    (local_BCHW,) = pair.further_views
    assert [tuple(each.shape) for each in (pair.views_a_BCHW, pair.views_b_BCHW, local_BCHW)] == [
        (8, 3, 16, 16),
        (8, 3, 16, 16),
        (8, 3, 8, 8),
    ]
    torch.manual_seed(0)
    given, policy = batch(), training.modules.view_policy
    images = given.inputs_a.float() / 255
    assert torch.equal(pair.views_b_BCHW, policy(images, given.draw_keys(seed=0, view=1)))
    assert torch.equal(local_BCHW, policy.further_view(images, given.draw_keys(seed=0, view=2)))  # type: ignore[operator]
    assert torch.equal(pair.labels["base"], given.labels["base"])

    encoder = training.modules.encoder
    both = torch.cat([pair.views_a_BCHW, pair.views_b_BCHW])
    z = [*encoder(both, 2).chunk(2), encoder(local_BCHW)]
    torch.testing.assert_close(list(z_NBD), [each.detach() for each in z])
    loss = Spread()(z[0], z[1], pair, z[2]).loss
    expected = torch.autograd.grad(loss, list(encoder.parameters()))
    for (name, _), gradient in zip(encoder.named_parameters(), expected, strict=True):
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-8, atol=1e-12)


def test_micro_batches_keep_the_samples_of_all_views_together() -> None:
    (whole, _), (parts, _) = (train(f"memory.micro_batches={num}")[1].seen[0] for num in (1, 2))
    for name in ("views_a_BCHW", "views_b_BCHW"):
        assert torch.equal(getattr(whole, name), getattr(parts, name))
    assert torch.equal(whole.further_views[0], parts.further_views[0])


def test_a_policy_of_two_views_calls_an_objective_of_many_with_two() -> None:
    _, objective, _ = train(views="{kind: expert_image}")
    ((pair, z_NBD),) = objective.seen
    assert len(z_NBD) == 2
    assert pair.further_views == ()


def test_an_objective_of_samples_gets_the_pictures_without_a_view() -> None:
    samples = "objective.kind=nt_xent", "objective.negatives=samples"
    training, objective, _ = train(*samples, views="{kind: expert_image}")
    ((pair, (_, _, z_BD)),) = objective.seen
    assert torch.equal(pair.further_views[0], batch().inputs_a.float() / 255)
    torch.testing.assert_close(z_BD, training.modules.encoder(pair.further_views[0].double()).detach())


def test_sounds_and_an_encoder_that_prunes_the_second_view_have_no_samples_as_negatives() -> None:
    samples = "objective={kind: nt_xent, negatives: samples}"
    for recipe, more, why in (
        ("debug:image", ["encoder.late_pruning={}"], "and takes no samples"),
        ("debug:audio", [], "is for pictures, not for sounds"),
    ):
        with pytest.raises(UserError, match=why):
            resolve_recipe(recipe, [samples, *more])
