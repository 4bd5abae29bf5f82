"""Probe any encoder on any dataset from Python: `probe(encoder, train, test)` returns accuracies by label.

Each picture is encoded once, without views. Its features stay in memory for all epochs of the linear probe and for
kNN; the pictures do not. For datasets of this package the accuracies are those of `trainer.probe --set views=none`, if
`num_epochs` is that of the run.

Shapes: N samples, B batch, C channels, H height, W width, F features of the linear probe, D features of kNN.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from data_pipeline.core.errors import UserError
from data_pipeline.storage.manifest import Manifest
from data_pipeline.storage.source_digests import content_digest, shared_sources
from trainer.data import DataConfig, read_manifests
from trainer.models.encoder import Encoder, inside_wrappers
from trainer.probes.features import TRAIN_DRAW, LabelSpace, encode, frozen, read_pictures
from trainer.probes.fitting import fit_stored
from trainer.probes.linear import ProbeConfig, Target
from trainer.probes.shared import check_shared
from trainer.probes.targets import check_labelled, label_targets
from trainer.views.inputs import to_floating, to_unit_range

logger = logging.getLogger(__name__)

LabelledData: TypeAlias = str | Path | Dataset[Any] | DataLoader[Any] | tuple[Any, Any]
"""A location of a dataset of this package; a torch Dataset of (picture, label) or (picture, {name: label}); a
DataLoader of batches of these; or a pair of arrays of NumPy or torch, the pictures and their labels."""

ONLY_LABEL: Final = "label"  # the name of a label without a name
WITHOUT_VIEWS: Final = ProbeConfig(views="none")
_FIXED: Final = {"views": "none", "batch_norm": "eval", "reads": "features"}
_CPU: Final = torch.device("cpu")
_OTHER_SCALE: Final = 2.0  # the ratio of the deviations of train and test inputs above which they are said to differ


@dataclass(frozen=True)
class Accuracy:
    """Test accuracies of one label, in [0, 1], and the accuracy of a guess.

    linear: of a linear probe on the features.
    knn: of a vote of the nearest neighbours.
    chance: one over the number of classes that the samples have.
    num_neighbors: how many neighbours vote, the k of kNN.
    """

    linear: float
    knn: float
    chance: float
    num_neighbors: int


def probe(
    encoder: nn.Module | Callable[[Tensor], Tensor],
    train: LabelledData,
    test: LabelledData,
    *,
    config: ProbeConfig = WITHOUT_VIEWS,
    batch_size: int = 128,
) -> dict[str, Accuracy]:
    """Return the test accuracies of a frozen encoder for each label (or for `config.labels`), by its name.

    `encoder` is an `Encoder`, also inside DataParallel, DistributedDataParallel, AveragedModel or `torch.compile`, or a
    module or function from pictures (B, C, H, W) to features (B, D). It gets uint8 pictures scaled to [0, 1], int16
    waveforms (B, T) scaled to [-1, 1), and floats as they are, `batch_size` at a time: a module on the device and in
    the dtype of its parameters, a function as float32 on the CPU. A module runs in eval mode, also if its method is
    passed, and is not changed; a function is called as it is. An autocast around this call has no effect; a function
    may use one of its own.

    A label without a name is called "label". Classes are whole numbers from 0, and -1 for a sample without the label,
    which takes no part in its accuracy.

    The linear probe is the published protocol: SGD at a learning rate of 0.01, on features that are not standardised.
    So its accuracy depends on the scale of the features. Compare encoders of other libraries after standardising their
    features, or by kNN.

    `config` sets epochs, learning rate and seed of the linear probe, and the k of kNN; there are no views. On several
    ranks, every rank calls this with the same arguments, and computes all of it.

    Raises `UserError` if a dataset is missing or has no labels, if the labels of both differ, or if the encoder returns
    anything but finite rows. It also does so if more of the test samples than `config.allow_shared` are in the train
    set too: by their sources for two datasets of this package, by their values for two of others. Warns if the values
    of both sets are scaled differently.
    """
    check_without_views(config)
    if isinstance(train, str | Path) and isinstance(test, str | Path):
        data = DataConfig(train_dir=str(train), test_dir=str(test))
        manifests = read_manifests(data)
        _, said = check_shared(data, train=manifests.train, test=manifests.test, allowed=config.allow_shared)
        if said is not None:
            logger.warning("%s", said)
    # In inference mode no head can be fitted. Autocast would keep the first copy of the head's weights.
    with torch.inference_mode(False), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        reader = AnyEncoder(encoder)
        with frozen(reader, getattr(encoder, "__self__", None)):  # of a method, the module that has it
            known = _encode(reader, train, which="train", batch_size=batch_size)
            asked = _encode(reader, test, which="test", batch_size=batch_size)
        targets = _targets(known, asked, wanted=config.labels)
        _check_inputs(known, asked, allowed=config.allow_shared)
        fitted = fit_stored(known.features, asked.features, targets=targets, config=config, device=reader.device)
    return {
        name: Accuracy(one.linear.accuracy, one.knn_accuracy, one.target.chance, one.num_neighbors)
        for name, one in fitted.items()
    }


def check_without_views(config: ProbeConfig) -> None:
    """Raise `UserError` for a setting of the probe that only a run can have."""
    if config.fit_settings != config.fit_settings | _FIXED:
        raise UserError(
            "a probe of any encoder encodes each picture once, without views, and reads what the encoder returns; "
            f"the config must have {', '.join(f'{name}={value}' for name, value in _FIXED.items())}. For other values "
            "use `python -m trainer.probe RUN_DIR`"
        )


class AnyEncoder(nn.Module):
    """Any module or function from pictures (B, C, H, W) to rows (B, D), or an `Encoder`, as probes call an encoder.

    A module gets pictures on the device and in the dtype of its parameters, a function float32 on the CPU.
    `deviations` are the standard deviations of the batches that it got.
    """

    def __init__(self, encoder: nn.Module | Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        inner = inside_wrappers(encoder)
        self.encoder = inner if isinstance(inner, Encoder) else encoder
        parameter = next(self.parameters(), None)
        self.device = _CPU if parameter is None else parameter.device
        self._dtype = parameter.dtype if parameter is not None and parameter.is_floating_point() else None
        self.deviations: list[Tensor] = []

    def features_and_pooled(self, x_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the linear probe reads and what kNN reads, float32. Raises `UserError` if they are no rows."""
        encoder, inputs = self.encoder, x_BCHW.to(self.device, self._dtype)
        self.deviations.append(inputs.float().std(correction=0))
        if isinstance(encoder, Encoder):
            features_BF, pooled_BC = encoder.features_and_pooled(inputs)
            return features_BF.float(), pooled_BC.float()
        features_BD: Tensor = encoder(inputs)
        if features_BD.dim() != 2 or len(features_BD) != len(inputs):
            raise UserError(
                f"the encoder returns {tuple(features_BD.shape)} for {len(inputs)} pictures, but a probe reads one row "
                "for each, (B, D); pool or flatten it, for example by "
                "nn.Sequential(encoder, nn.AdaptiveAvgPool2d(1), nn.Flatten())"
            )
        return features_BD.float(), features_BD.float()


@dataclass(frozen=True)
class _Encoded:
    """The features (N, F) and pooled features (N, C) of a dataset, and its labels (N,) int64 on the host.

    digests_N: a short digest of each input, of data of others; of a dataset of this package there is a manifest.
    deviation: the mean over batches of the standard deviation of the inputs, as the encoder gets them.
    """

    features: Sequence[Tensor]
    by_label: Mapping[str, Tensor]
    manifest: Manifest | None
    digests_N: NDArray[np.uint64]
    deviation: float


def _encode(reader: AnyEncoder, data: LabelledData, *, which: str, batch_size: int) -> _Encoded:
    """Encode each sample once. `which` is "train" or "test", for errors and for the draw of an online overlay."""
    manifest, digests = None, list[bytes]()
    reader.deviations.clear()
    if isinstance(data, str | Path):
        pictures = read_pictures(data, draw=TRAIN_DRAW if which == "train" else 0)
        manifest, labels = pictures.manifest, pictures.by_label
        features = encode(reader.features_and_pooled, pictures, device=reader.device, batch_size=batch_size)
    else:
        if isinstance(data, tuple):
            data = TensorDataset(*map(torch.as_tensor, data))
        if not isinstance(data, DataLoader):
            # A generator of its own, because a loader draws a number for its workers, also without any.
            data = DataLoader(data, batch_size=batch_size, generator=torch.Generator())
        parts, label_parts = [], []
        for batch in data:
            inputs, label_of = _inputs_and_labels(batch, which=which)
            convert = to_unit_range if isinstance(reader.encoder, Encoder) else to_floating
            parts.append(reader.features_and_pooled(convert(inputs)))
            label_parts.append(label_of)
            values = inputs.detach().cpu().flatten(1).contiguous().view(torch.uint8).numpy()
            digests += [content_digest(row)[:8] for row in values]
        if not parts:
            raise UserError(f"the {which} set of the probe holds no sample")
        features = [torch.cat(each) for each in zip(*parts, strict=True)]
        labels = {name: torch.cat([label_of[name] for label_of in label_parts]) for name in label_parts[0]}
    if not all(whole.isfinite().all() for whole in features):
        raise UserError(f"the features of the {which} set are not all finite; did the training of the encoder diverge?")
    digests_N = np.frombuffer(b"".join(digests), dtype=np.uint64)
    return _Encoded(features, labels, manifest, digests_N, float(torch.stack(reader.deviations).mean()))


def _check_inputs(train: _Encoded, test: _Encoded, *, allowed: float) -> None:
    """Warn of inputs on another scale. Raises `UserError` if too many test inputs of others are train inputs too."""
    low, high = sorted((train.deviation, test.deviation))
    if high > _OTHER_SCALE * low:
        logger.warning(
            "the inputs have a standard deviation of %.3g in the train set but %.3g in the test set; is one of them "
            "scaled or normalised differently?",
            train.deviation,
            test.deviation,
        )
    shared = shared_sources(train.digests_N, test.digests_N)
    if shared.share > allowed:
        raise UserError(
            f"{shared.num_shared} of the {shared.num_test} test samples are in the train set too, so test accuracy "
            "would partly measure training samples; take them out, or allow a share of them with config.allow_shared"
        )


def _inputs_and_labels(batch: Any, *, which: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the inputs of a batch, and by name its classes (B,) int64 on the host.

    Raises `UserError` if it is anything but (inputs, labels), with a whole number for each input.
    """
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise UserError(
            f"the {which} set of the probe has no labels: it gives {type(batch).__name__} in place of (picture, label) "
            "or (picture, {name: label})"
        )
    inputs, labels = batch
    named = labels if isinstance(labels, Mapping) else {ONLY_LABEL: labels}
    for name, label_B in named.items():
        if not isinstance(label_B, Tensor) or label_B.is_floating_point() or label_B.shape != (len(inputs),):
            raise UserError(f"label {name!r} of the {which} set is not one whole number for each picture, a class")
    return inputs, {str(name): label_B.long().cpu() for name, label_B in named.items()}


def _targets(train: _Encoded, test: _Encoded, *, wanted: Sequence[str] | None) -> dict[LabelSpace, Target]:
    """Return the labels to predict. Raises `UserError` if the two sets do not have the same labels."""
    if train.manifest is not None and test.manifest is not None:
        return label_targets(train, test, wanted=wanted)
    names = train.by_label if wanted is None else wanted
    if missing := sorted(set(names) - (train.by_label.keys() & test.by_label.keys())):
        raise UserError(
            f"the train set has the labels {', '.join(train.by_label)} and the test set {', '.join(test.by_label)}, "
            f"but both need {', '.join(missing)}"
        )
    parts = {name: (train.by_label[name], test.by_label[name]) for name in names}
    targets = {name: Target(*labels, num_classes=int(labels[0].max()) + 1) for name, labels in parts.items()}
    check_labelled(targets)
    for name, target in targets.items():
        if int(target.test_N.max()) >= target.num_classes:
            raise UserError(f"the test set has classes of label {name!r} that the train set lacks; number both alike")
    return targets
