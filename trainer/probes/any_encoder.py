"""Probe any encoder on any dataset from Python: `probe(encoder, train, test)` returns accuracies by label.

Each picture is encoded once, without views. Its features stay in memory for all epochs of the linear probe and for
kNN; the pictures do not. For datasets of this package the accuracies are those of `trainer.probe --views none`, if
`num_epochs` is that of the run.

Shapes: N samples, B batch, C channels, H height, W width, F features of the linear probe, D features of kNN.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset

from data_pipeline.audio.log_mel import mel_config
from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import NO_LABEL
from data_pipeline.loading.whole import read_all
from data_pipeline.storage.manifest import Manifest
from data_pipeline.storage.store import SampleStore
from trainer.data import DataConfig
from trainer.probes.features import TRAIN_DRAW, FeatureEncoder, LabelSpace, features_and_pooled, frozen, frozen_calls
from trainer.probes.knn import knn_accuracies
from trainer.probes.linear import ProbeConfig, Target, fit_linear_probe, num_labelled, stored_batches
from trainer.probes.shared import check_shared, find_shared
from trainer.probes.targets import readable_labels
from trainer.views.expert_audio import clean_spectrogram
from trainer.views.inputs import to_floating, to_unit_range

logger = logging.getLogger(__name__)

Labels: TypeAlias = Tensor | Mapping[str, Tensor]
LabelledData: TypeAlias = str | Path | SampleStore | Dataset[Any] | DataLoader[Any] | tuple[Tensor, Labels]
"""A location or an open store of this package; a torch Dataset of (picture, label) or (picture, {name: label}); a
DataLoader of batches of these; or the tensors themselves, pictures (N, C, H, W) and labels (N,)."""
_Batches: TypeAlias = Iterator[tuple[Tensor, Mapping[str, Tensor]]]

ONLY_LABEL: Final = "label"  # the name of a label without a name
_WITHOUT_VIEWS: Final = ProbeConfig(views="none")
_CPU: Final = torch.device("cpu")
_WRAPPERS: Final = (nn.DataParallel, DistributedDataParallel, AveragedModel)  # call the module inside as it is


@dataclass(frozen=True)
class Accuracy:
    """Test accuracies of one label, in [0, 1], and the accuracy of a guess.

    linear: of a linear probe on the features.
    knn: of a vote of the nearest neighbours.
    chance: one over the number of classes that the samples have.
    """

    linear: float
    knn: float
    chance: float


def probe(
    encoder: nn.Module | FeatureEncoder | Callable[[Tensor], Tensor],
    train: LabelledData,
    test: LabelledData,
    *,
    labels: Sequence[str] | None = None,
    config: ProbeConfig = _WITHOUT_VIEWS,
    batch_size: int = 128,
) -> dict[str, Accuracy]:
    """Return the test accuracies of a frozen encoder for each label (or for `labels`, or `config.labels`), by its name.

    `encoder` is an `Encoder`, also inside DataParallel, DistributedDataParallel, AveragedModel or `torch.compile`, or a
    module or function from pictures (B, C, H, W) to features (B, D). It gets uint8 pictures scaled to [0, 1], int16
    waveforms (B, T) scaled to [-1, 1), and floats as they are, `batch_size` at a time: a module on the device and in
    the dtype of its parameters, a function as float32 on the CPU. It is not changed: modules, also those that a
    function calls, run in eval mode and get their modes back. An autocast around this call has no effect; a function
    may use one of its own.

    A label without a name is called "label". Classes are whole numbers from 0, and -1 for a sample without the label,
    which takes no part in its accuracy.

    The linear probe is the published protocol: SGD at a learning rate of 0.01, on features that are not standardised.
    So its accuracy depends on the scale of the features. Compare encoders of other libraries after standardising their
    features, or by kNN.

    `config` sets epochs, learning rate and seed of the linear probe; there are no views. On several ranks, every rank
    calls this with the same arguments, and computes all of it.

    Raises `UserError` if a dataset is missing or has no labels, if the labels of both differ, or if the encoder returns
    anything but finite rows. It also does so if two datasets of this package share more of the test samples than
    `config.allow_shared`. They are not compared if that is 1.
    """
    if config.fit_settings != config.fit_settings | _FIXED:
        raise UserError(
            "probe(encoder, train, test) encodes each picture once, without views, and reads what the encoder returns; "
            f"the config must have {', '.join(f'{name}={value}' for name, value in _FIXED.items())}. For other values "
            "use `python -m trainer.probe`"
        )
    encoder = _without_wrappers(encoder)
    train, test = (SampleStore(data) if isinstance(data, str | Path) else data for data in (train, test))
    if isinstance(train, SampleStore) and isinstance(test, SampleStore) and config.allow_shared < 1:
        _refuse_shared(train, test, allowed=config.allow_shared)
    # In inference mode no head can be fitted. Autocast would keep the first copy of the head's weights.
    with torch.inference_mode(False), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        with frozen(encoder, getattr(encoder, "__self__", None)):  # of a method, the module that has it
            known = _encode(encoder, train, which="train", batch_size=batch_size)
            asked = _encode(encoder, test, which="test", batch_size=batch_size)
        targets = _targets(known, asked, wanted=labels if labels is not None else config.labels)
        batches = stored_batches(known.features_NF, targets, config=config)
        linear = fit_linear_probe(batches, test_features=lambda: asked.features_NF, targets=targets, config=config)
        knn = knn_accuracies(known.pooled_ND, asked.pooled_ND, targets)
    return {name: Accuracy(linear[name].result.accuracy, knn[name], target.chance) for name, target in targets.items()}


_FIXED: Final = {"views": "none", "batch_norm": "eval", "reads": "features", "precision": "float32"}


@dataclass(frozen=True)
class _Encoded:
    """The features of a dataset, and its labels (N,) int64 on the host. `manifest` is None for data of others."""

    features_NF: Tensor
    pooled_ND: Tensor
    labels: Mapping[str, Tensor]
    manifest: Manifest | None


def _refuse_shared(train: SampleStore, test: SampleStore, *, allowed: float) -> None:
    """Log a warning if test samples are in the train set too. Raises `UserError` if more than `allowed` are."""
    data = DataConfig(train_dir=str(train.location), test_dir=str(test.location), remote=test.remote)
    shared = find_shared(data, train=train.manifest, test=test.manifest)
    if (said := check_shared(shared, data, allowed=allowed)) is not None:
        logger.warning("%s", said)


def _encode(encoder: object, data: LabelledData, *, which: str, batch_size: int) -> _Encoded:
    """Encode each sample once. `which` is "train" or "test", for errors and for the draw of an online overlay."""
    manifest = data.manifest if isinstance(data, SampleStore) else None
    checks_range = _normalises_itself(encoder) and (manifest is None or manifest.medium == "picture")
    parameter = next(encoder.parameters(), None) if isinstance(encoder, nn.Module) else None
    device = _CPU if parameter is None else parameter.device
    precision = parameter.dtype if parameter is not None and parameter.is_floating_point() else None
    features: list[Tensor] = []
    pooled: list[Tensor] = []
    labels: dict[str, list[Tensor]] = {}
    for inputs, label_of in _batches(data, which=which, batch_size=batch_size):
        x_BCHW = (to_unit_range(inputs) if checks_range else to_floating(inputs)).to(device, precision)
        with nullcontext() if isinstance(encoder, nn.Module) else frozen_calls():
            if _normalises_itself(encoder):
                features_BF, pooled_BD = features_and_pooled(cast(FeatureEncoder, encoder), x_BCHW)
            else:
                features_BF = pooled_BD = cast(Callable[[Tensor], Tensor], encoder)(x_BCHW)
        features.append(_rows(features_BF, len(inputs)))
        pooled.append(_rows(pooled_BD, len(inputs)))
        for name, label_B in label_of.items():
            labels.setdefault(name, []).append(_classes(label_B, name, which=which, num=len(inputs)))
    if not features:
        raise UserError(f"the {which} set of the probe holds no sample with a label; give it some")
    features_NF = torch.cat(features)
    pooled_ND = torch.cat(pooled) if _normalises_itself(encoder) else features_NF
    if not (features_NF.isfinite().all() and pooled_ND.isfinite().all()):
        raise UserError(f"the features of the {which} set are not all finite; did the training of the encoder diverge?")
    return _Encoded(features_NF, pooled_ND, {name: torch.cat(parts) for name, parts in labels.items()}, manifest)


def _without_wrappers(encoder: nn.Module | FeatureEncoder | Callable[[Tensor], Tensor]) -> Any:
    """Return the encoder with features of its own inside torch's wrappers; `encoder` as it is if there is none."""
    inside: Any = encoder
    while not _normalises_itself(inside) and (isinstance(inside, _WRAPPERS) or hasattr(inside, "_orig_mod")):
        inside = inside.module if isinstance(inside, _WRAPPERS) else inside._orig_mod
    return inside if _normalises_itself(inside) else encoder


def _normalises_itself(encoder: object) -> bool:
    """Return whether an encoder has both methods of a `FeatureEncoder`, as `trainer.models.Encoder` has."""
    return all(callable(getattr(encoder, name, None)) for name in ("features", "pooled"))


def _batches(data: LabelledData, *, which: str, batch_size: int) -> _Batches:
    """Yield the inputs and the labels by name of all samples that have a label, in order."""
    if isinstance(data, SampleStore):
        yield from _stored(data, draw=TRAIN_DRAW if which == "train" else 0, batch_size=batch_size)
    elif isinstance(data, tuple):
        inputs, labels = _as_pair(data, which=which)
        for first in range(0, max(len(inputs), *map(len, labels.values())), batch_size):
            rows = slice(first, first + batch_size)
            yield inputs[rows], {name: label_N[rows] for name, label_N in labels.items()}
    else:
        if not isinstance(data, DataLoader):
            # A generator of its own, because a loader draws a number for its workers, also without any.
            data = DataLoader(cast(Dataset[Any], data), batch_size=batch_size, generator=torch.Generator())
        yield from (_as_pair(item, which=which) for item in data)


def _stored(store: SampleStore, *, draw: int, batch_size: int) -> _Batches:
    """Yield the inputs and labels of a dataset of this package; leaves out samples without any label."""
    rate = store.manifest.sample_rate
    for batch in read_all(store, batch_size=batch_size, draw=draw):
        inputs = batch.inputs_a if rate is None else clean_spectrogram(batch.inputs_a, mel_config(rate))
        has_one_B = torch.zeros(len(batch), dtype=torch.bool)
        for label_B in batch.labels.values():
            has_one_B |= label_B != NO_LABEL
        if has_one_B.any():
            yield inputs[has_one_B], {name: label_B[has_one_B] for name, label_B in batch.labels.items()}


def _as_pair(item: Any, *, which: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the inputs and the labels by name of (inputs, labels). Raises `UserError` if it is anything else."""
    if not isinstance(item, tuple | list) or len(item) != 2 or not isinstance(item[0], Tensor):
        raise UserError(
            f"the {which} set of the probe has no labels: it gives {type(item).__name__} in place of (picture, label) "
            "or (picture, {name: label})"
        )
    inputs, labels = item
    named = labels if isinstance(labels, Mapping) else {ONLY_LABEL: labels}
    try:
        return inputs, {str(name): torch.as_tensor(classes) for name, classes in named.items()}
    except (TypeError, ValueError):
        raise UserError(
            f"the labels of the {which} set are {type(labels).__name__}; a probe predicts classes, one whole number "
            "for each picture"
        ) from None


def _classes(label_B: Tensor, name: str, *, which: str, num: int) -> Tensor:
    """Return classes (B,) int64 on the host."""
    if label_B.is_floating_point() or label_B.is_complex() or label_B.shape != (num,):
        raise UserError(
            f"label {name!r} of the {which} set is {str(label_B.dtype).removeprefix('torch.')} of shape "
            f"{tuple(label_B.shape)} for {num} pictures; a probe predicts classes, one whole number for each picture"
        )
    return label_B.long().cpu()


def _rows(features_BF: Tensor, num: int) -> Tensor:
    if not isinstance(features_BF, Tensor) or features_BF.dim() != 2 or len(features_BF) != num:
        shape = tuple(features_BF.shape) if isinstance(features_BF, Tensor) else type(features_BF).__name__
        raise UserError(
            f"the encoder returns {shape} for {num} pictures, but a probe reads one row for each, (B, D); pool or "
            "flatten it, for example by nn.Sequential(encoder, nn.AdaptiveAvgPool2d(1), nn.Flatten())"
        )
    return features_BF.float()


def _targets(train: _Encoded, test: _Encoded, *, wanted: Sequence[str] | None) -> dict[LabelSpace, Target]:
    """Return the labels to predict. Raises `UserError` if the two sets do not have the same labels."""
    if train.manifest is not None and test.manifest is not None:
        named = readable_labels(train.manifest, test.manifest, wanted=wanted)
        num_classes = {name: len(classes) for name, classes in named.items()}
    else:
        num_classes = {name: int(label_N.max()) + 1 for name, label_N in train.labels.items()}
        num_classes = {name: num for name, num in num_classes.items() if wanted is None or name in wanted}
    if missing := sorted(
        (set(wanted or num_classes) | num_classes.keys()) - (train.labels.keys() & test.labels.keys())
    ):
        raise UserError(
            f"the train set has the labels {', '.join(train.labels)} and the test set {', '.join(test.labels)}, but "
            f"both need {', '.join(missing)}"
        )
    targets = {name: Target(train.labels[name], test.labels[name], num) for name, num in num_classes.items()}
    for name, target in targets.items():
        for which, label_N in (("train", target.train_N), ("test", target.test_N)):
            if not num_labelled(label_N):
                raise UserError(f"none of the {which} samples has the label {name!r}; leave it out of `labels`")
        if train.manifest is None and int(target.test_N.max()) >= target.num_classes:
            raise UserError(f"the test set has classes of label {name!r} that the train set lacks; number both alike")
    return targets
