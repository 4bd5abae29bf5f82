"""Toy pictures, encoders and policies, for which the right answer is known by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from configs import debug
from data_pipeline.core.counter_rng import DrawKeys
from data_pipeline.loading.decode import DecodedSamples
from data_pipeline.storage.manifest import Fields, HowMade, LabelEntry, Manifest, OverlayEntry, Tars
from trainer.modules import build_modules
from trainer.probed_runs import readout
from trainer.probes.features import Pictures


def toy_pictures(num: int, *, seed: int, num_wrong: int = 0) -> Pictures:
    """Make 8x8 pictures: the upper half's brightness is the base class (of 2), the lower's the overlay class (of 3).

    The labels of the first `num_wrong` pictures are shifted by one class, so a classifier that has learned the rule
    gets those wrong and the others right.
    """
    draw = torch.Generator().manual_seed(seed)
    base_N, overlay_N = (torch.randint(num_classes, (num,), generator=draw) for num_classes in (2, 3))
    images_NCHW = torch.randint(0, 60, (num, 3, 8, 8), generator=draw)
    images_NCHW[:, :, :4] += 150 * base_N[:, None, None, None]
    images_NCHW[:, :, 4:] += 90 * overlay_N[:, None, None, None]
    wrong_N = torch.arange(num) < num_wrong
    by_label = {
        "base": torch.where(wrong_N, (base_N + 1) % 2, base_N),
        "overlay": torch.where(wrong_N, (overlay_N + 1) % 3, overlay_N),
    }
    samples = DecodedSamples(torch.arange(num), by_label, pictures_BCHW=images_NCHW.to(torch.uint8))
    return Pictures(toy_manifest(num), samples, by_label)


def toy_manifest(num: int) -> Manifest:
    return Manifest(
        num_samples=num,
        medium="picture",
        input_shape=(3, 8, 8),
        labels={
            "base": LabelEntry(title="base", classes=("dark", "bright"), counts=(num, 0)),
            "overlay": LabelEntry(
                title="overlay", classes=("low", "middle", "high"), counts=(num, 0, 0), given_by="overlay"
            ),
        },
        mean=(0.5,) * 3,
        std=(0.25,) * 3,
        overlay=OverlayEntry(kind="toy", drawn="baked"),
        how_made=HowMade(dataset="toy", source="test", split="train", source_sha256="0" * 64),
        tars=Tars(fields=Fields(), numbered=True, num_tars=1, num_bytes=4096 * num),
        files={},
    )


def read_out(train: Pictures, test: Pictures, **probe: Any) -> Any:
    """Return the results, without times, and the heads of an untrained encoder. `probe` holds settings of the probe."""
    recipe = debug.image()
    modules = build_modules(recipe)
    config = recipe.probe.model_copy(update={"num_epochs": 2, "learning_rate": 0.1, **probe})
    cpu = torch.device("cpu")
    found, fitted = readout.read_out(modules.encoder, modules.view_policy, train, test, config, cpu, step=0, facts={})
    results = {space: result.model_dump(exclude={"seconds"}) for space, result in found.items()}
    heads = {space: (head.weight_KF.tolist(), head.bias_K.tolist()) for space, head in fitted.by_label.items()}
    return results, heads


class ToyEncoder(nn.Module):
    """An encoder of batch norm alone, which counts the pictures that it has encoded, and in which mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.seen: list[tuple[int, bool]] = []

    def features_and_pooled(self, views_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        self.seen.append((len(views_BCHW), self.norm.training))
        normalised: Tensor = self.norm(views_BCHW)
        halves = [normalised[:, :, :4].mean((2, 3)), normalised[:, :, 4:].mean((2, 3))]
        return normalised.flatten(1), torch.cat(halves, dim=1)

    def pooled(self, views_BCHW: Tensor) -> Tensor:
        return self.features_and_pooled(views_BCHW)[1]


class Spy:
    """A policy that changes nothing and remembers its keys."""

    def __init__(self) -> None:
        self.keys: list[DrawKeys] = []

    def __call__(self, images_BCHW: Tensor, keys: DrawKeys, masks_BHW: Tensor | None) -> Tensor:
        assert masks_BHW is not None
        assert masks_BHW.shape == (len(images_BCHW), *images_BCHW.shape[2:])
        assert images_BCHW.dtype == torch.float32
        assert float(images_BCHW.max()) <= 1.0
        self.keys.append(keys)
        return images_BCHW
