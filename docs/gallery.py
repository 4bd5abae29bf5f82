"""Draw the pictures of docs/gallery.md: every overlay, every setting and every view policy, from data made here.

python docs/gallery.py        # a minute on one core; writes docs/gallery/*.webp
"""

from __future__ import annotations

import argparse
import io
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from data_pipeline.audio.log_mel import MelConfig, log_mel, mel_config, power_mel
from data_pipeline.building.build import build_dataset
from data_pipeline.core.batch import Batch
from data_pipeline.loading.whole import read_all
from data_pipeline.storage.manifest import Manifest
from data_pipeline.storage.store import SampleStore
from data_pipeline.tools.preview import pictures_of
from trainer.observability.figures import GridRow, picture_grid
from trainer.observability.view_grid import to_nhwc
from trainer.views import BaseViewsConfig, build_view_policy, two_views

Options = Mapping[str, str]

GALLERY = Path(__file__).parent / "gallery"
NUM = 8  # pictures of a row
DIGITS = {"digits": "sklearn"}
PLACED = {"kind": "sklearn", "image_size": "32", "digit_size": "20"}
# The title of a row, its dataset, and the options of its source and of its overlay.
DATASETS: list[tuple[str, str, Options, Options]] = [
    ("procedural", "procedural", {}, {}),
    ("shapes", "procedural_shapes", {}, {}),
    ("digits", "procedural_digits", {}, DIGITS),
    ("letters", "procedural_letters", {}, {}),
    ("tiled_digit\nunique=1", "procedural_tiled_digit", {}, {**DIGITS, "unique": "1"}),
    ("... 100", "procedural_tiled_digit", {}, {**DIGITS, "unique": "100"}),
    ("dominoes", "procedural_dominoes", {}, {**DIGITS, "join": "square"}),
    ("second_digit\nsize=12", "placed_digits_second_digit", PLACED, {**DIGITS, "size": "12"}),
    ("... 24", "placed_digits_second_digit", PLACED, {**DIGITS, "size": "24"}),
    ("bits", "placed_digits_bits", PLACED, {"bits": "7"}),
    ("boolean", "placed_digits_boolean", PLACED, {}),
    ("shared\nnumber", "procedural_shared_number", {}, {**DIGITS, "length": "4"}),
    ("colours", "placed_digits_colours", PLACED, {}),
    ("trifeature", "trifeature", {"image_size": "64"}, {}),
]
CROP = {"kind": "expert_image", "jitter_probability": 0, "grayscale_probability": 0, "blur_probability": 0}
VIEWS: dict[str, dict[str, Any]] = {
    "expert_image": {"kind": "expert_image"},
    "its crop alone": CROP,
    "random_mask": {"kind": "random_mask"},
    "channel\ndropout": {"kind": "channel_dropout", "shared": "view"},
    "adversarial\nmask": {"kind": "adversarial_mask"},
    "viewmaker\nuntrained": {"kind": "viewmaker"},
    "... budget=0.2": {"kind": "viewmaker", "budget": 0.2},
    "... behind\na crop": {"kind": "sequence", "parts": [CROP, {"kind": "viewmaker"}]},
    "pair: expert,\nviewmaker": {"kind": "pair", "first": {"kind": "expert_image"}, "second": {"kind": "viewmaker"}},
    "multi_crop": {"kind": "multi_crop"},
}
SOUND_VIEWS: dict[str, dict[str, Any]] = {
    "spectral": {"kind": "spectral"},
    "waveform": {"kind": "waveform"},
    "viewmaker\nuntrained": {"kind": "viewmaker", "clamp": False},
}


def make_batch(dataset: str, source_options: Options, overlay_options: Options) -> tuple[Batch, Manifest]:
    """Build a small dataset, and return its first `NUM` samples and its manifest."""
    with tempfile.TemporaryDirectory() as home:
        source = "procedural" if dataset.startswith("spoken") else None
        build_dataset(
            dataset,
            Path(home) / "data",
            limit=5 * NUM,
            source=source,
            source_options=source_options,
            overlay_options=overlay_options,
        )
        store = SampleStore(Path(home) / "data")
        return next(read_all(store, batch_size=NUM)), store.manifest


def row_of_dataset(title: str, dataset: str, source_options: Options, overlay_options: Options) -> GridRow:
    """Return a row of `NUM` samples, at 64 x 64 pixels. Of added channels, the first sample's."""
    batch, manifest = make_batch(dataset, source_options, overlay_options)
    if dataset.endswith(("_bits", "_boolean", "_shared_number")):
        pictures_BCHW = batch.inputs_a[0, -NUM:, None].expand(-1, 3, -1, -1) / 255
    else:
        pictures_BCHW = torch.from_numpy(pictures_of(batch, manifest)).permute(0, 3, 1, 2) / 255
    return GridRow(title, to_nhwc(F.interpolate(pictures_BCHW, size=(64, 64))))


def row_of_views(config: dict[str, Any], batch: Batch, mel: MelConfig | None = None) -> Tensor:
    """Return both views of each of the first `NUM` / 2 samples, side by side, (NUM, C, H, W)."""
    torch.manual_seed(0)
    policy = build_view_policy(BaseViewsConfig.kinds.parse(config), image_channels=3, mel=mel)
    with torch.no_grad():
        views = two_views(policy, batch.inputs_a[: NUM // 2], seed=0, step=0)
    return torch.stack(views, dim=1).flatten(0, 1)


def write(name: str, rows: list[GridRow]) -> None:
    """Write a grid as WebP."""
    picture = Image.open(io.BytesIO(picture_grid(rows, column_titles=[])))
    GALLERY.mkdir(exist_ok=True)
    picture.convert("RGB").save(GALLERY / f"{name}.webp", quality=60, method=6)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    write("datasets", [row_of_dataset(*row) for row in DATASETS])
    batch, _ = make_batch("procedural_digits", {}, DIGITS)
    rows = {"picture": (batch.inputs_a[: NUM // 2] / 255).repeat_interleave(2, dim=0)}
    rows |= {title: row_of_views(config, batch) for title, config in VIEWS.items()}
    write("views", [GridRow(title, to_nhwc(row.clamp(0, 1))) for title, row in rows.items()])
    batch, manifest = make_batch("spoken_noise", {}, {})
    assert manifest.sample_rate is not None
    mel = mel_config(manifest.sample_rate, batch.inputs_a.shape[1])
    sounds = log_mel(power_mel(batch.inputs_a[: NUM // 2], mel), mel)[:, None]
    rows = {"sound": sounds.repeat_interleave(2, dim=0)}
    rows |= {title: row_of_views(config, batch, mel) for title, config in SOUND_VIEWS.items()}
    low, high = sounds.min(), sounds.max()  # black and white; low bands are at the bottom
    grey = {title: ((row - low) / (high - low)).clamp(0, 1).flip(2) for title, row in rows.items()}
    write("sounds", [GridRow(title, to_nhwc(row)) for title, row in grey.items()])


if __name__ == "__main__":
    main()
