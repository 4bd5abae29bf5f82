"""The decoded contents and labels of every source and overlay that needs no files from elsewhere."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_pipeline.core.batch import Batch
from data_pipeline.loading.whole import read_all
from tests.golden.digests import digest
from tests.golden.traces import command
from tests.tars import simple, write_folder

NUM_SAMPLES = 12
OVERLAYS = ("shapes", "digits", "letters", "colours", "dominoes", "second_digit", "tiled_digit")
ONLINE = ["--overlay", "online"]
BY_CODE = ["--source", "procedural"]
LARGE = ["--size", "64", "--overlay", "digits", "--overlay-option", "digits=sklearn", "--overlay-option"]

# The words of `build`; those of the dataset "tars" are of `index`.
CASES = {
    "procedural": ["procedural"],
    "procedural, repeated": ["procedural_digits", "--repeats", "2", "--seed", "7"],
    "procedural, test": ["procedural_digits", "--split", "test"],
    **{f"{overlay}, baked": [f"procedural_{overlay}"] for overlay in OVERLAYS},
    **{f"{overlay}, online": [f"procedural_{overlay}", *ONLINE] for overlay in (*OVERLAYS, "bits")},
    "placed_digits": ["placed_digits", "--source-option", "kind=sklearn"],
    "trifeature": ["trifeature"],
    "spoken": ["spoken", *BY_CODE],
    "noise": ["noise", *BY_CODE],
    "spoken_noise, baked": ["spoken_noise", *BY_CODE],
    "spoken_noise, online": ["spoken_noise", *BY_CODE, *ONLINE],
    "spoken_noise, random offset": ["spoken_noise", *BY_CODE, *ONLINE, "--overlay-option", "noise_crop=random_offset"],
    "folder": ["folder", "--source-option", "image_size=32"],
    "folder, kept": ["folder", "--source-option", "image_size=32", "--keep"],
    "tars": ["tars", "--size", "32"],
    "tars with large digits": ["tars", *LARGE, "layout=scaled"],
    "tars with tiled digits": ["tars", *LARGE, "layout=tiled"],
}


def one_case(case: str, directory: Path) -> dict[str, Any]:
    """Build or index a dataset, and return labels and digests of its samples in stored order, for two draws."""
    dataset, *options = CASES[case]
    if dataset == "tars":
        built = simple(directory / "tars", [5, 7])
        command("index", str(built), *options, "--workers", "1")
    else:
        built = directory / "built"
        if dataset == "folder":
            options += ["--root", str(write_folder(directory / "folder", num=NUM_SAMPLES))]
        words = ["--out", str(built), "--limit", str(NUM_SAMPLES), "--samples-per-shard", "5", "--workers", "1"]
        command("build", dataset, *options, *words)
    found: dict[str, Any] = {}
    for draw in (0, 1) if {"online", "--overlay"} & set(options) else (0,):
        batches = list(read_all(built, batch_size=5, draw=draw))
        found |= {f"{name} of draw {draw}": value for name, value in _samples(batches).items()}
    return found


def _samples(batches: list[Batch]) -> dict[str, Any]:
    inputs = torch.cat([batch.inputs_a for batch in batches])
    found: dict[str, Any] = {"shape": list(inputs.shape)}
    found["sounds" if inputs.is_floating_point() else "pictures"] = _compact(inputs)
    if all(batch.masks_BHW is not None for batch in batches):
        found["masks"] = _compact(torch.cat([batch.masks_BHW for batch in batches if batch.masks_BHW is not None]))
    for label in batches[0].labels:
        found[f"label {label}"] = torch.cat([batch.labels[label] for batch in batches]).tolist()
    return found


def _compact(values: Tensor) -> str | list[float]:
    if values.is_floating_point():
        return digest(values)
    return hashlib.sha256(values.contiguous().numpy().tobytes()).hexdigest()
