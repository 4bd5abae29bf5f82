"""Build the datasets that a session reads, unless they are there, with the command that a user would type.

Their files lie below the root of a setting: cifar10/train/CLASS/* and cifar10/test/CLASS/*, or in cifar10 what
torchvision downloads; mnist/MNIST/raw; recordings/* of the Free Spoken Digit Dataset; noise/*.wav.
"""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.gpu_stages.session import Setting, call


def built(setting: Setting, dataset: str) -> Path:
    """Return the directory of a dataset of the recipes, such as "cifar10_digits"; build it if it is not there.

    In a dry run it holds few samples, which are generated. Raises `RuntimeError` if it cannot be built.
    """
    out = setting.data / dataset
    if not all((out / split / "manifest.json").is_file() for split in ("train", "test")):
        name, options = _tiny_options(dataset) if setting.is_tiny else (dataset, _options(dataset, setting.root))
        drawn = () if dataset in {"cifar10", "spoken"} else ("--overlay", "online")
        call(setting, "-m", "data_pipeline", "build", name, "--split", "both", "--out", str(out), *drawn, *options)
    return out


def _tiny_options(dataset: str) -> tuple[str, tuple[str, ...]]:
    if dataset.startswith("cifar10"):
        return dataset.replace("cifar10", "procedural"), ("--limit", "32")
    return dataset, ("--source", "procedural", "--limit", "32")


def _options(dataset: str, root: Path) -> tuple[str, ...]:
    options = ["--workers", str(os.cpu_count() or 1)]
    if not dataset.startswith("cifar10"):
        noise = () if dataset == "spoken" else ("--overlay-option", f"noise_root={root / 'noise'}")
        return (*options, "--source", "fsdd", "--root", str(root), *noise)
    pictures = root / "cifar10"
    options += ["--source", "folder" if (pictures / "train").is_dir() else "torchvision", "--root", str(pictures)]
    if dataset == "cifar10_digits":
        kind = "mnist" if any(root.rglob("train-images-idx3-ubyte*")) else "mnist_t10k"
        options += ["--overlay-option", f"digits_root={root / 'mnist'}", "--overlay-option", f"digits={kind}"]
    return tuple(options)
