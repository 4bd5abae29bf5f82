"""Late pruning: which weights the second view loses, the law of the draws, and what is pruned when.

That ranks, micro batches, recomputed activations and pieces of an encoder prune the same is in test_exactness.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from configs import resolve_recipe
from data_pipeline.core.errors import UserError
from trainer.models import build_encoder
from trainer.models.encoder import Encoder, ResNetConfig
from trainer.models.late_pruning import LatePruningConfig, set_pruned_step

NORMALISED = {"mean": (0.5,) * 3, "std": (0.25,) * 3}


def small_encoder(**settings: object) -> Encoder:
    torch.manual_seed(0)
    config = ResNetConfig.model_validate({"kind": "resnet10", "width": 4, **NORMALISED, **settings})
    return build_encoder(config)


def both_views() -> Tensor:
    return torch.rand(12, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def pruned_layers(encoder: Encoder) -> dict[str, nn.Module]:
    return {name: layer for name, layer in encoder.named_modules() if hasattr(layer, "kept")}


def test_the_second_view_is_that_of_an_encoder_whose_late_weights_are_zero() -> None:
    """Each half is encoded by a plain encoder: the second one by a copy with zeros in place of the pruned weights."""
    encoder, plain = small_encoder(late_pruning=LatePruningConfig(blocks=2, share=0.3)), small_encoder()
    assert list(encoder.state_dict()) == list(plain.state_dict())
    set_pruned_step(encoder, seed=3, step=5, first_view=0)
    zeroed = copy.deepcopy(plain)
    for name, layer in pruned_layers(encoder).items():
        assert name.startswith(("trunk.layer3.", "trunk.layer4."))
        zeroed.get_submodule(name).weight.data *= layer.kept()  # type: ignore[operator]
    first, second = both_views().chunk(2)
    embeddings = encoder(both_views(), 2)
    torch.testing.assert_close(embeddings, torch.cat([plain(first), zeroed(second)]))
    embeddings[6:].sum().backward()
    for layer in pruned_layers(encoder).values():
        kept, gradient = layer.kept(), layer.weight.grad  # type: ignore[operator]
        assert isinstance(gradient, Tensor)
        assert not gradient[~kept].any()
        assert gradient[kept].any()


def test_the_draws_have_their_law_and_differ_by_step_update_seed_and_layer() -> None:
    encoder = small_encoder(width=16, late_pruning={"blocks": 2, "share": 0.3})
    layers = pruned_layers(encoder)
    assert len(layers) == 6
    drawn = []
    for seed, step, first_view in ((0, 0, 0), (0, 1, 0), (0, 0, 2), (1, 0, 0)):
        set_pruned_step(encoder, seed=seed, step=step, first_view=first_view)
        kept = torch.cat([layer.kept().flatten() for layer in layers.values()])  # type: ignore[operator]
        assert kept.float().mean().item() == pytest.approx(0.7, abs=0.005)
        drawn += [kept, *(layer.kept().flatten()[:500] for layer in layers.values())]  # type: ignore[operator]
    for number, one in enumerate(drawn):
        for other in drawn[:number]:
            agreement = (one[:500] == other[:500]).float().mean().item()
            assert one is other or agreement == 1 or agreement == pytest.approx(0.58, abs=0.12)
    assert len({tuple(one[:500].tolist()) for one in drawn}) == 4 * len(layers)


def test_nothing_is_pruned_in_eval_mode_and_before_the_first_step() -> None:
    encoder, plain = small_encoder(late_pruning=LatePruningConfig()), small_encoder()
    assert torch.equal(encoder(both_views(), 2), plain(both_views(), 2))
    set_pruned_step(encoder, seed=0, step=0, first_view=0)
    assert torch.equal(encoder.eval()(both_views()), plain.eval()(both_views()))


def test_what_cannot_be_pruned_is_refused() -> None:
    with pytest.raises(UserError, match=r"late_pruning.blocks is 9, but this encoder has 4 blocks"):
        small_encoder(late_pruning={"blocks": 9})
    small_views = ["objective.kind=dino", "views={kind: multi_crop, num_local: 2, local_size: 8}"]
    for settings, reason in (
        (["objective.kind=instance_discrimination"], "trains the second view"),
        (small_views, "without further ones"),
        (["encoder.batch_norm=split"], "batch_norm=split"),
    ):
        with pytest.raises(UserError, match=reason):
            resolve_recipe("debug:image", ["encoder.late_pruning={}", *settings])
