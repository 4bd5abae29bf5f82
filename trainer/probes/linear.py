"""Fit a linear probe: softmax regression on the flattened map before pooling of a frozen encoder (Tamkin et al. 2022).

On a GPU, the samples lie in its memory if they fit, and overlays, views and features are made there, for several steps
at a time.

The head is trained on views of the pretraining policy, with a new view of each picture in each epoch, and tested on
pictures without views. The encoder is frozen, so the heads of several labels are trained in one pass over the same
features. They share only the input, so each has the same bits as if it were trained alone. A picture may be the
spectrogram of a sound.

With several ranks, each rank encodes whole steps for all, and then every rank trains on all steps. The heads have the
same bits on any number of ranks.

Shapes: N pictures, B batch, C channels, F features, K classes of a label.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from data_pipeline.core.counter_rng import DrawKeys
from data_pipeline.core.errors import UserError
from data_pipeline.core.progress import Progress
from data_pipeline.core.randomness import generator
from data_pipeline.core.sample import NO_LABEL
from data_pipeline.core.schema import (
    BatchSize,
    Count,
    LabelName,
    LearningRate,
    PositiveShare,
    Schema,
    Seed,
    Share,
    ShareBelowOne,
)
from trainer.distributed.collectives import all_gather_rows, rank, world_size
from trainer.probes.features import FeatureEncoder, LabelSpace, Pictures, ViewFunction
from trainer.views.inputs import to_floating

# The `view` of DrawKeys. Steps use 0 and 1, and in turns 2 and 3. Several viewmaker steps and small crops use 4 and
# more, so they share draws with a probe of the same seed. Another number would change the bits of old probes.
PROBE_VIEW = 4
_MOVED_AT_ONCE = 4_096  # rows of features that lie on the host
_MOST_STEPS, _MOST_PIXELS = 8, 1 << 20  # that a GPU encodes at once, because it would wait for the host's launches
_CPU = torch.device("cpu")
_NOT_FINITE = -2  # in place of the class of a row whose scores are not all finite; no sample has it as its label


class ProbeConfig(Schema):
    """Settings of the probes; the defaults are the published protocol.

    milestones: fractions of `num_epochs`; at each the learning rate is multiplied by 0.1.
    views: "policy" trains on one view of the pretraining policy for each picture and epoch, "none" on the pictures.
    batch_norm: "eval" always uses the encoder's running statistics. "train" uses batch statistics while the head is
        trained, as the original code does. That changes the running statistics, which the test then uses. It needs a
        single process.
    reads: the input of the probes: the features of the encoder, its embedding (the output of the projector), or the
        pixels without any encoder. See `trainer.probed_runs.readout`. The online probe always reads the features.
    num_neighbors: the k of kNN; of a label with a smaller class, the train samples of that class.
    online_every_steps, online_num_train, online_num_test: the steps between two measurements of kNN and ridge
        regression during training (None: never), and the number of samples they use at most. See
        `trainer.probes.online`.
    allow_shared: the greatest share of test samples whose source (the clean picture or sound) is in the train set too.
        Above it, training and probes refuse the data. See `trainer.probes.shared`.
    labels: the labels to probe (None: every label of the data that has at least two classes, or is a number).
    groups: the pairs of labels in whose groups accuracies are measured (None: every pair). See `trainer.probes.groups`.
    """

    num_epochs: Count = 100
    batch_size: BatchSize = 128
    learning_rate: LearningRate = 0.01
    momentum: ShareBelowOne = 0.9
    milestones: Annotated[tuple[PositiveShare, ...], Field(max_length=100)] = (0.6, 0.8)
    views: Literal["policy", "none"] = "policy"
    batch_norm: Literal["eval", "train"] = "eval"
    reads: Literal["features", "embedding", "pixels"] = "features"
    num_neighbors: Count = 200
    seed: Seed = 0
    online_every_steps: Count | None = None
    online_num_train: Count = 4096
    online_num_test: Count = 1024
    allow_shared: Share = 0.01
    labels: Annotated[tuple[LabelName, ...], Field(min_length=1, max_length=100)] | None = None
    groups: Annotated[tuple[tuple[LabelName, LabelName], ...], Field(max_length=100)] | None = None

    @property
    def fit_settings(self) -> dict[str, Any]:
        """Return the settings that change a head: not those of the online probe, the labels and the shared samples."""
        others = {"allow_shared", "labels", "groups"}
        return {
            name: value
            for name, value in self.model_dump().items()
            if not name.startswith("online_") and name not in others
        }

    @property
    def protocol(self) -> ProbeConfig:
        """Return this config with defaults for every setting that does not change a head."""
        return ProbeConfig(**self.fit_settings)


class LinearResult(Schema):
    """Test accuracies in [0, 1]. `accuracy` is that of the last epoch; this is the one to report."""

    accuracy: float
    accuracy_by_epoch: tuple[float, ...]
    train_accuracy_by_epoch: tuple[float, ...]


@dataclass(frozen=True)
class LinearHead:
    """A trained head: logits (B, K) = features (B, F) times `weight_KF` transposed, plus `bias_K`."""

    weight_KF: Tensor
    bias_K: Tensor

    def logits(self, features_BF: Tensor) -> Tensor:
        return F.linear(features_BF, self.weight_KF, self.bias_K)

    def classes(self, features_NF: Tensor) -> Tensor:
        """Return the class of each row, (N,) int64, by `best_classes`.

        Features that do not fit on the head's device lie on the host.
        """
        device = self.weight_KF.device
        parts = [features_NF] if features_NF.device == device else torch.split(features_NF, _MOVED_AT_ONCE)
        return torch.cat([best_classes(self.logits(part.to(device))) for part in parts])


@dataclass(frozen=True)
class Target:
    """One label to predict: class numbers of the train pictures (N,) and of the test pictures, int64.

    A picture with `NO_LABEL` takes no part: not in a fit, not as a neighbour, and not in an accuracy.
    """

    train_N: Tensor
    test_N: Tensor
    num_classes: int

    @property
    def is_in_all(self) -> bool:
        """Return whether every train picture has the label."""
        return num_labelled(self.train_N) == len(self.train_N)

    @property
    def chance(self) -> float:
        """Return one over the number of classes that a sample has.

        Tars with the labels 1 to 10 name a class 0 too.
        """
        labels_M = torch.cat([self.train_N.cpu(), self.test_N.cpu()])
        return 1 / max(1, int((torch.bincount(labels_M[labels_M != NO_LABEL]) > 0).sum()))


def num_labelled(label_N: Tensor) -> int:
    """Return how many samples have a label, (N,) int64, and not `NO_LABEL`."""
    return int((label_N != NO_LABEL).sum())


def best_classes(score_NK: Tensor) -> Tensor:
    """Return the class of the highest score of each row, (N,) int64; a negative number if a score is not finite."""
    return torch.where(score_NK.isfinite().all(1), score_NK.argmax(1), _NOT_FINITE)


def accuracy(class_N: Tensor, label_N: Tensor) -> float:
    """Return the share of the labelled samples whose class is right, of classes and labels (N,) int64.

    Returns nan if the class of a labelled sample is negative, because its scores are not finite.
    """
    label_N = label_N.to(class_N.device)
    if not ((class_N >= 0) | (label_N == NO_LABEL)).all():
        return math.nan
    return int((class_N == label_N).sum()) / num_labelled(label_N)  # a class is never `NO_LABEL`


def check_finite(value: float, *, name: str) -> float:
    """Return a result of the label `name`. Raises `UserError` if it is nan."""
    if math.isnan(value):
        raise UserError(
            f"label_{name} cannot be probed: the encoder's features are not all finite, or too large; did its training "
            "diverge? Take an earlier --step"
        )
    return value


FeatureBatch: TypeAlias = tuple[Tensor, Mapping[LabelSpace, Tensor]]
"""The input of the heads in one step: features (B, F) float32, and by label the classes (B,) int64."""


def fit_linear_probe(
    batches: Callable[[int], Iterable[FeatureBatch]],
    *,
    test_features: Callable[[], Tensor],
    targets: Mapping[LabelSpace, Target],
    config: ProbeConfig,
) -> dict[LabelSpace, LinearProbe]:
    """Train a head for each target by SGD on the cross entropy, all in one pass over the features.

    `batches(epoch)` yields the steps of an epoch. `test_features()` returns (N_test, F) and is called after each epoch.
    Shows the progress with the test accuracies. Raises `UserError` if a head diverges, or if features are not finite.
    """
    heads: dict[LabelSpace, LinearProbe] = {}
    with Progress("epochs of the linear probe", total=config.num_epochs, enabled=rank() == 0) as progress:
        for epoch in range(config.num_epochs):
            learning_rate = config.learning_rate * 0.1 ** sum(
                epoch >= int(fraction * config.num_epochs) for fraction in config.milestones
            )
            for features_BF, labels in batches(epoch):
                if not heads:
                    heads = {name: LinearProbe(target, features_BF, config) for name, target in targets.items()}
                for name, head in heads.items():
                    head.step(features_BF, labels[name], learning_rate=learning_rate)
            test_NF = test_features()
            for name, head in heads.items():
                head.end_epoch(name, test_NF, targets[name].test_N)
            shown = (f"label_{name} {100 * head.test_accuracy[-1]:.1f} %" for name, head in heads.items())
            progress.advance(note=", ".join(shown))
    return heads


def drawn_batches(
    encoder: FeatureEncoder,
    view_policy: ViewFunction,
    train: Pictures,
    *,
    labels: Sequence[LabelSpace],
    config: ProbeConfig,
    device: torch.device,
) -> Callable[[int], Iterator[FeatureBatch]]:
    """Return the function `batches` for `fit_linear_probe`, for train samples that are drawn again in every epoch.

    Overlays and views depend only on (config.seed, epoch, sample index). With `batch_norm` "train", the encoder is in
    train mode while it encodes. The function is called in a context `frozen`, on every rank.
    """

    def encoded(row_B: Tensor, epoch: int) -> FeatureBatch:
        def keys(index_B: Tensor) -> DrawKeys:
            return DrawKeys(config.seed, epoch, index_B, PROBE_VIEW)

        batch = train.inputs(row_B, keys)
        inputs = to_floating(batch.inputs_a.to(device))
        if config.views == "policy":
            masks_BHW = None if batch.masks_BHW is None else batch.masks_BHW.to(device)
            views_BCHW = view_policy(inputs, keys(train.samples.index_B[row_B].to(device)), masks_BHW)
        else:
            views_BCHW = train.seen(inputs)
        encoder.train(config.batch_norm == "train")
        features_BF, _ = encoder.features_and_pooled(views_BCHW)
        encoder.eval()
        return features_BF, {space: batch.labels[space].to(device) for space in labels}

    def batches(epoch: int) -> Iterator[FeatureBatch]:
        rows = epoch_rows(len(train), epoch=epoch, config=config, device=train.samples.index_B.device)
        num_steps = _steps_at_once(train, config=config, device=device)
        chunks = _together(rows, num_steps)
        firsts = range(0, len(chunks), world_size())
        # The chunks left over at the end go to the first ranks; the others repeat the last chunk.
        mine = [chunks[min(first + rank(), len(chunks) - 1)] for first in firsts]
        title = f"epoch {epoch + 1} of the linear probe"
        for first, row_X in zip(firsts, train.ahead(mine, title=title), strict=True):
            steps = _steps_of_all_ranks(encoded(row_X, epoch), num_steps=num_steps)
            yield from steps[: len(rows) - first * num_steps]

    return batches


def check_ranks(config: ProbeConfig) -> None:
    """Raise `UserError` if several ranks cannot fit the probe."""
    if config.batch_norm == "train" and world_size() > 1:
        raise UserError(
            f"a probe with batch_norm train moves the running statistics step by step, and {world_size()} ranks take "
            "steps at once; start it as one process"
        )


def _steps_at_once(train: Pictures, *, config: ProbeConfig, device: torch.device) -> int:
    """Return how many steps are encoded at once. Batch statistics are those of one step."""
    if device.type != "cuda" or config.batch_norm == "train":
        return 1
    return max(1, min(_MOST_STEPS, _MOST_PIXELS // (config.batch_size * math.prod(train.size))))


def _together(rows: Sequence[Tensor], num_steps: int) -> Sequence[Tensor]:
    """Join the rows of each `num_steps` steps. The last chunk repeats the last step, so that all are equally large."""
    if num_steps == 1:
        return rows
    filled = [*rows, *[rows[-1]] * (-len(rows) % num_steps)]
    return [torch.cat(filled[start : start + num_steps]) for start in range(0, len(filled), num_steps)]


def _steps_of_all_ranks(chunk: FeatureBatch, *, num_steps: int) -> list[FeatureBatch]:
    """Return the steps of the chunks of all ranks, which are equally large, in rank order."""
    num = world_size() * num_steps
    features = all_gather_rows(chunk[0]).chunk(num)
    labels = {space: all_gather_rows(label_X).chunk(num) for space, label_X in chunk[1].items()}
    return [(part_BF, {space: labels[space][number] for space in labels}) for number, part_BF in enumerate(features)]


def epoch_rows(num: int, *, epoch: int, config: ProbeConfig, device: torch.device = _CPU) -> Sequence[Tensor]:
    """Return the rows of each step of an epoch, on a device: a seeded permutation cut into full batches.

    The rows that fill no batch are left out, and differ from epoch to epoch. A set smaller than a batch is one batch.
    """
    order = torch.from_numpy(generator(config.seed, "linear probe order", epoch).permutation(num))
    batch_size = min(config.batch_size, num)
    return torch.split(order[: num - num % batch_size].to(device), batch_size)


class LinearProbe:
    """The head of one target while it is trained, its accuracies by epoch, and the test classes of the last one.

    Attributes:
        predicted_N: the classes that the head gave to the test samples at the end of the last epoch, (N,) int64.
    """

    predicted_N: Tensor

    def __init__(self, target: Target, like_BF: Tensor, config: ProbeConfig) -> None:
        device, num_features = like_BF.device, like_BF.shape[1]
        draw = torch.Generator().manual_seed(config.seed)
        bound = 1 / math.sqrt(num_features)  # as torch.nn.Linear draws its weights

        def parameter(*shape: int) -> Tensor:
            drawn = torch.empty(shape, dtype=like_BF.dtype).uniform_(-bound, bound, generator=draw)
            return drawn.to(device).requires_grad_()

        self._weight_KF = parameter(target.num_classes, num_features)
        self._bias_K = parameter(target.num_classes)
        self._parameters = [self._weight_KF, self._bias_K]
        self._velocities = [torch.zeros_like(parameter) for parameter in self._parameters]
        self._momentum = config.momentum
        self._is_in_all = target.is_in_all
        self._num_right, self._loss = torch.zeros((), device=device), torch.zeros((), device=device)
        self._num_seen = 0
        self.train_accuracy, self.test_accuracy = list[float](), list[float]()
        self._are_finite = torch.ones((), dtype=torch.bool, device=device)  # the features that were seen

    def step(self, features_BF: Tensor, label_B: Tensor, *, learning_rate: float) -> None:
        self._are_finite &= features_BF.isfinite().all()
        label_B = label_B.to(features_BF.device)
        if not self._is_in_all:
            rows = (label_B != NO_LABEL).nonzero()[:, 0]
            features_BF, label_B = features_BF[rows], label_B[rows]
            if not len(rows):
                return
        with torch.enable_grad():
            logits_BK = F.linear(features_BF, self._weight_KF, self._bias_K)
            loss = F.cross_entropy(logits_BK, label_B)
            gradients = torch.autograd.grad(loss, self._parameters)
        with torch.no_grad():  # SGD as in torch.optim, which takes longer on the host than all kernels of a step
            torch._foreach_mul_(self._velocities, self._momentum)
            torch._foreach_add_(self._velocities, gradients)
            torch._foreach_add_(self._parameters, self._velocities, alpha=-learning_rate)
        # Summed on the device: reading a number in every step would make the host wait for the device.
        self._num_right += (logits_BK.detach().argmax(1) == label_B).sum()
        self._loss += loss.detach()
        self._num_seen += len(label_B)

    def end_epoch(self, name: str, test_NF: Tensor, test_label_N: Tensor) -> None:
        """Measure the test accuracy, and the train accuracy of the epoch, on views and while the head changed.

        Raises `UserError` if features or loss are not finite.
        """
        epoch = len(self.test_accuracy) + 1
        if not self._are_finite.item():
            raise UserError(
                f"no linear probe of label_{name} can be fitted: the encoder's features are not all finite in epoch "
                f"{epoch}; probe with --set views=none if the views are the cause, or take an earlier --step"
            )
        if not math.isfinite(self._loss.item()):
            raise UserError(
                f"the linear probe of label_{name} diverged in its epoch {epoch}: its loss is not finite; "
                "lower probe.learning_rate"
            )
        self.train_accuracy.append(self._num_right.item() / max(1, self._num_seen))
        self._num_right.zero_()
        self._loss.zero_()
        self._num_seen = 0
        self.predicted_N = self.head.classes(test_NF)
        self.test_accuracy.append(check_finite(accuracy(self.predicted_N, test_label_N), name=name))

    @property
    def result(self) -> LinearResult:
        return LinearResult(
            accuracy=self.test_accuracy[-1],
            accuracy_by_epoch=tuple(self.test_accuracy),
            train_accuracy_by_epoch=tuple(self.train_accuracy),
        )

    @property
    def head(self) -> LinearHead:
        return LinearHead(self._weight_KF.detach(), self._bias_K.detach())
