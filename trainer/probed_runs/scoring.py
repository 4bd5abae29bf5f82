"""Score an encoder of others on datasets of ours: `python -m trainer.probe --encoder ENCODER --train DIR --test DIR`.

With `--data DIR` in place of `--train` and `--test`, on every setting of the suppression benchmark.

Guarantees: the encoder is not changed, and no result depends on the number of ranks. Results of the same encoder are
not computed again: the same file, and the same bits of the features of some test samples.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from data_pipeline.building.suppression_settings import ENCODER, NUM_SMALL, SETTINGS, Scale, Setting
from data_pipeline.core.counter_rng import DrawKeys
from data_pipeline.core.errors import UserError, printable
from data_pipeline.core.imports import import_code, import_object
from trainer.data import DataConfig, read_agreed_manifests
from trainer.distributed.collectives import from_first_rank, on_first_rank, rank
from trainer.pretrained import load_encoder, open_network
from trainer.probed_runs.probing import check_labels, read_data, scored_on, short_hash, write_results
from trainer.probed_runs.readout import read_out
from trainer.probes.any_encoder import WITHOUT_VIEWS, AnyEncoder, check_without_views
from trainer.probes.benchmark import benchmark_probe
from trainer.probes.features import Pictures, frozen
from trainer.probes.linear import ProbeConfig
from trainer.probes.result import ScoredEncoder, read_result
from trainer.probes.targets import readable_labels
from trainer.views.inputs import to_floating

AnyNetwork: TypeAlias = nn.Module | Callable[[Tensor], Tensor]
_OF_LIBRARY = ("timm:", "torchvision:")
_NUM_TRIED = 16  # test samples by whose features an encoder is known again
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
    (module,) = import_code([path])
    encoder: Any = import_object(f"{module}:{name}")
    if isinstance(encoder, type) or not callable(encoder):
        raise UserError(f"{text} is a {type(encoder).__name__}; name a module, or a function from pictures to features")
    return encoder  # type: ignore[no-any-return]  # it is checked when it is called


def score(
    text: str, *, train_dir: str, test_dir: str, out: Path | None, settings: Sequence[str], device: torch.device
) -> None:
    """Probe the encoder that `text` names, and write and print the results.

    `out` is by default scored/NAME-HASH in the working directory, with the short hash of the data. `settings` change
    the probe, which fits on samples without views. Every rank calls this. Raises the errors of `open_encoder`, and
    `UserError` if a dataset is missing, has no label, or shares too many samples with the other, or if the encoder
    cannot encode it.
    """
    data = DataConfig(train_dir=train_dir, test_dir=test_dir)
    if problem := _score(text, open_encoder(text), data, out, settings=settings, device=device):
        raise UserError(problem)


def score_benchmark(text: str, *, root: Path, out: Path | None, settings: Sequence[str], device: torch.device) -> None:
    """Probe the encoder that `text` names on each dataset of the suppression benchmark in `root`/SETTING/DIFFICULTY.

    Each result is as that of `score`, but by the probe of the benchmark, and in `out`/SETTING-DIFFICULTY; `out` is
    by default scored/NAME. A dataset that the encoder cannot encode is named and left out. Every rank
    calls this. Raises the errors of `score`, and `UserError` if there is no dataset, or none that it can encode.
    """
    places = [train.parent for train in sorted(root.glob("*/*/train")) if train.parts[-3] in SETTINGS]
    encoder, out, num_left_out = open_encoder(text), out or Path("scored", _name(text)), 0
    for place in places:
        name, difficulty = place.parts[-2:]
        data = DataConfig(train_dir=str(place / "train"), test_dir=str(place / "test"))
        where = (out / f"{name}-{difficulty}", (SETTINGS[name], difficulty))
        if problem := _score(text, encoder, data, *where, settings=settings, device=device):
            num_left_out += 1
            if rank() == 0:
                print(f"left out: {printable(problem)}", file=sys.stderr, flush=True)
    if num_left_out == len(places):
        raise UserError(f"{text} can encode none of the {len(places)} datasets of the suppression benchmark in {root}")


def _name(text: str) -> str:
    """Return the name of the directory of an encoder's results, such as "my.py-encoder"."""
    return re.sub(r"[^\w.]+", "-", text if _file(text) is None else Path(text).name).strip("-.")


def _file(text: str) -> Path | None:
    file = Path(text.rpartition(":")[0] if _OBJECT.fullmatch(text) else text)
    return file if file.is_file() else None


def _score(
    text: str,
    network: AnyNetwork,
    data: DataConfig,
    out: Path | None,
    place: tuple[Setting, str] | None = None,
    *,
    settings: Sequence[str],
    device: torch.device,
) -> str:
    """Probe an encoder on data that may have a place in the benchmark, unless its results are there.

    Returns why it cannot encode them, or "".
    """
    data = data.absolute()
    manifests = read_agreed_manifests(data)
    config, factors = WITHOUT_VIEWS, dict[str, str]()
    if place is not None:
        scale: Scale = "small" if manifests.probed.num_samples <= NUM_SMALL["train"] else "full"
        config = benchmark_probe(place[0], scale)
        factors = place[0].factors(place[1], scale=scale, cure=ENCODER + Path(text).name)
    config = config.override(settings, where="the probe")
    check_without_views(config)
    check_labels(data, manifests, config)
    train, test, num_shared = read_data(data, manifests, config)
    encoder = AnyEncoder(network.to(device) if isinstance(network, nn.Module) else network)
    features, problem = from_first_rank(lambda: _try(encoder, test, device), tuple[str, str])
    if problem:
        return f"{text} cannot encode the samples of {data.test_dir}: {problem}"
    record = scored_on(data, text, file=_file(text))
    scored = record.model_copy(update={"features": features, "factors": factors})
    hashes = (manifests.probed.sha256, manifests.test.sha256)
    out = out or Path("scored", f"{_name(text)}-{short_hash(hashes)}")
    paths = [out / f"{label}.json" for label in readable_labels(manifests.probed, manifests.test, wanted=config.labels)]
    if from_first_rank(lambda: all(_is_there(path, scored, config, hashes) for path in paths), bool):
        on_first_rank(lambda: print(f"{out}: scored already"))
        return ""
    facts = {"num_shared": num_shared, "run": text, "scored": scored}
    results, heads = read_out(encoder, _without_views, train, test, config, device, step=1, facts=facts)
    write_results(out, results, heads)
    return ""


def _try(encoder: AnyEncoder, test: Pictures, device: torch.device) -> tuple[str, str]:
    """Return the SHA-256 of the features of some samples and "", or "" and why the encoder fails on them."""
    pictures = test.pictures(torch.arange(min(_NUM_TRIED, len(test))))
    try:
        with frozen(encoder):
            features_BF, _ = encoder.features_and_pooled(to_floating(pictures.to(device)))
    except Exception as error:  # whatever the code of others raises
        reason = " ".join(str(error).split())
        return "", f"{type(error).__name__} for an input of shape {tuple(pictures.shape)}: {reason}"
    return hashlib.sha256(features_BF.cpu().numpy().tobytes()).hexdigest(), ""


def _is_there(path: Path, scored: ScoredEncoder, config: ProbeConfig, hashes: tuple[str, str]) -> bool:
    """Return whether a file holds the result of this encoder by this probe on these data."""
    try:
        result = read_result(path)
    except UserError:  # there is none, or a damaged one
        return False
    known = None if result.scored is None else result.scored.model_copy(update={"origin": scored.origin})
    return (known, result.probe_config, result.data) == (scored, config.protocol, hashes)


def _without_views(inputs: Tensor, _: DrawKeys, __: Tensor | None, /) -> Tensor:
    return inputs
