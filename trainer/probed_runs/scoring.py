"""Score an encoder of others on datasets of ours: `python -m trainer.probe --encoder ENCODER --train DIR --test DIR`.

Guarantees: the encoder is not changed, and no result depends on the number of ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from data_pipeline.core.counter_rng import DrawKeys
from data_pipeline.core.errors import UserError
from data_pipeline.core.imports import PYTHON_SUFFIX, find_in_working_directory, import_file, import_object
from trainer.data import DataConfig, read_agreed_manifests
from trainer.pretrained import load_encoder, open_network
from trainer.probed_runs.probing import check_labels, read_data, scored_on, short_hash, write_results
from trainer.probed_runs.readout import read_out
from trainer.probes.any_encoder import WITHOUT_VIEWS, AnyEncoder, check_without_views

AnyNetwork: TypeAlias = nn.Module | Callable[[Tensor], Tensor]
_OF_LIBRARY = ("timm:", "torchvision:")
_OBJECT = re.compile(r"[^:]+:[A-Za-z_]\w*")  # file.py:name or package.module:name


def open_encoder(text: str) -> AnyNetwork:
    """Return the encoder that `text` names: a module on the CPU, or a function, from pictures in [0, 1] to rows (B, D).

    `text` is "timm:NAME" or "torchvision:NAME", with pretrained weights; "FILE.py:NAME" or "package.module:NAME", a
    module or function of the user's own, whose code runs; or an export of ours, or a Hub directory. Raises `UserError`
    if there is no such encoder.
    """
    if text.startswith(_OF_LIBRARY):
        return open_network(text)
    path, _, name = text.rpartition(":")
    if not _OBJECT.fullmatch(text):
        if not Path(text).exists():
            raise UserError(
                f"{text} is no file and no directory; pass an export, a run directory, FILE.py:NAME, "
                "package.module:NAME, timm:NAME or torchvision:NAME as --encoder"
            )
        return load_encoder(text)
    if path.endswith(PYTHON_SUFFIX):
        path = import_file(Path(path))
    else:
        find_in_working_directory()
    encoder: Any = import_object(f"{path}:{name}")
    if isinstance(encoder, type) or not callable(encoder):
        raise UserError(f"{text} is a {type(encoder).__name__}; name a module, or a function from pictures to features")
    return encoder  # type: ignore[no-any-return]  # it is checked when it is called


def score(
    text: str, *, train_dir: str, test_dir: str, out: Path | None, settings: Sequence[str], device: torch.device
) -> Path:
    """Probe the encoder that `text` names, write and print the results, and return their directory.

    `out` is by default scored/NAME-HASH in the working directory, with the short hash of the data. `settings` change
    the probe, which fits on samples without views. Every rank calls this. Raises the errors of `open_encoder`, and
    `UserError` if a dataset is missing, has no label, or shares too many samples with the other.
    """
    config = WITHOUT_VIEWS.override(settings, where="the probe")
    check_without_views(config)
    data = DataConfig(train_dir=train_dir, test_dir=test_dir).absolute()
    manifests = read_agreed_manifests(data)
    check_labels(data, manifests, config)
    encoder = open_encoder(text)
    train, test, num_shared = read_data(data, manifests, config)
    reader = AnyEncoder(encoder.to(device) if isinstance(encoder, nn.Module) else encoder)
    file = Path(text.rpartition(":")[0] if _OBJECT.fullmatch(text) else text)
    scored = scored_on(data, text, file=file if file.is_file() else None)
    facts = {"num_shared": num_shared, "run": text, "scored": scored}
    results, heads = read_out(reader, _without_views, train, test, config, device, step=1, facts=facts)
    name = re.sub(r"[^\w.]+", "-", file.name if file.is_file() else text).strip("-.")
    directory = out or Path("scored", f"{name}-{short_hash((train.manifest.sha256, test.manifest.sha256))}")
    write_results(directory, results, heads)
    return directory


def _without_views(inputs: Tensor, _: DrawKeys, __: Tensor | None, /) -> Tensor:
    return inputs
