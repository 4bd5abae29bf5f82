"""Check before step 0 that the data fit the config."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from math import gcd

import torch

from data_pipeline.core.errors import UserError
from data_pipeline.loading.mixture import check_mixture, check_same_inputs
from data_pipeline.loading.order import check_batch_size, check_ranks
from data_pipeline.storage.manifest import Manifest
from trainer.config import RunConfig
from trainer.config_rules import check_classes, check_sections
from trainer.data import Manifests, read_manifests
from trainer.distributed.collectives import world_size
from trainer.mixture import TrainManifest, datasets_of, num_classes, weights_of
from trainer.models.batch_norm import check_splits
from trainer.models.encoder import InputSizeError, build_encoder, check_input_size
from trainer.open_settings import decide, input_size, normalization_of
from trainer.pretrained import load_start, read_weights
from trainer.probes.groups import pairs_of
from trainer.probes.shared import check_shared
from trainer.probes.targets import check_same_classes, option_difference, readable_labels

logger = logging.getLogger(__name__)


def check_data(config: RunConfig) -> Manifests:
    """Return the manifests of all datasets, after `check_manifests`, before a submission. Writes nothing.

    Raises `UserError` if a dataset is missing, or if tars are not indexed yet.
    """
    manifests = read_manifests(config.data)
    check_manifests(config, manifests)
    check_start(config, manifests)
    return manifests


def check_start(config: RunConfig, manifests: Manifests) -> None:
    """Raise `UserError` if the encoder cannot begin with the weights that the config names, if it names any.

    That is so if they cannot be read or do not fit, or if nobody says how their pictures were normalised: with another
    mean and std than in their training, an encoder gives other features, and nothing would show it.
    """
    if config.encoder.weights is None:
        return
    with torch.random.fork_rng(devices=[]):
        load_start(build_encoder(decide(config, manifests.train).encoder))
    own = config.encoder.weights_normalization == "own" and config.data.mel is None
    if own and read_weights(config.encoder).normalization is None:
        found = normalization_of(manifests.train)
        raise UserError(
            f"{config.encoder.weights} does not say by which mean and std pictures were normalised when its weights "
            "were trained; set encoder.weights_normalization=config, and encoder.mean and encoder.std to these values. "
            "torchvision, timm, lightly and solo-learn take those of ImageNet, [0.485,0.456,0.406] and "
            f"[0.229,0.224,0.225]; those of this train set are {found}"
        )


def check_manifests(config: RunConfig, manifests: Manifests) -> None:
    """Check the sections of the config against each other, and the data against the config.

    Raises `UserError` if sections do not fit, if the two datasets do not belong together or share too many sources, if
    they do not fit the config, or if the ranks do not divide the global batch.
    """
    check_classes(config)
    check_sections(config, where=f"the config {config.name}")
    config = config.model_copy(update={"data": config.data.with_sounds_of(manifests.train)})
    train, test = manifests.probed, manifests.test
    train_dir, test_dir = config.data.probed_dir, config.data.test_dir
    sources = dict(zip(config.data.train_locations.values(), datasets_of(manifests.train), strict=True))
    check_same_inputs({train_dir: train, **sources, test_dir: test})
    check_same_classes(train, test)
    if config.probe.labels is not None or config.probe.groups is not None:
        pairs_of(readable_labels(train, test), config.probe.groups)
        readable_labels(train, test, wanted=config.probe.labels)
    in_train, in_test = (None if each.overlay is None else each.overlay.layout for each in (train, test))
    if in_train != in_test:
        raise UserError(
            f"the overlay of {train_dir} is {in_train}, and that of {test_dir} {in_test}; "
            "build both with the same layout"
        )
    if (said := option_difference(train, test)) is not None:
        logger.warning("%s; build both with the same --seed and options, unless the test shall differ", said)
    _warn_of_splits(config, manifests)
    height, width = _check_medium(config, train)
    check_input_shape(config, height=height, width=width, where=train_dir)
    check_batch(config, manifests.train, num_ranks=world_size())
    check_batch_norm(config, height=height, width=width, num_ranks=world_size())
    _check_overlays(config, sources)
    config.objective.check_labels(num_classes(manifests.train))
    _, said = check_shared(config.data, train=manifests.train, test=test, allowed=config.probe.allow_shared)
    if said is not None:
        logger.warning("%s", said)


def _warn_of_splits(config: RunConfig, manifests: Manifests) -> None:
    """Warn if a train set was built as the test split, or a test set as the train split. Tars have no split."""
    train, test = (config.data.probed_dir, manifests.probed, "test"), (config.data.test_dir, manifests.test, "train")
    for location, manifest, other in (train, test):
        if manifest.tars.numbered and manifest.how_made.split == other:
            logger.warning("%s was built with --split %s; are train and test set exchanged?", location, other)


def _check_overlays(config: RunConfig, sources: Mapping[str, Manifest]) -> None:
    """Raise `UserError` if the overlays of the train set, or of the sources of a mixture, do not fit the config."""
    where, has_overlay = config.data.train_name, any(manifest.overlay is not None for manifest in sources.values())
    if config.views.protects is not None and not has_overlay:
        raise UserError(
            f"{config.views.protects} protects the overlay of a picture, but the pictures of {where} have "
            "none; set views.mask=none, or build a dataset with an overlay"
        )
    asked = "baked" if config.data.overlay == "baked" else "online"
    for location, manifest in sources.items():
        if manifest.overlay is not None and manifest.overlay.drawn != asked:
            raise UserError(
                f"the overlay of {location} is {manifest.overlay.drawn}, but data.overlay is {config.data.overlay}; "
                f"build it with `--overlay {asked}`, or set data.overlay={manifest.overlay.drawn}"
            )
    if config.data.overlay == "online_per_view" and not has_overlay:
        raise UserError(
            f"the samples of {where} have no overlay, but data.overlay=online_per_view draws one for each view; "
            "set data.overlay=online, or build a dataset with an overlay"
        )


def check_batch(config: RunConfig, train: TrainManifest | None, *, num_ranks: int) -> None:
    """Raise `UserError` if ranks, micro batches or the groups of split batch norm do not divide the global batch.

    `train` is None if the train set is not known; then only its size is not checked.
    """
    size, num_parts = config.global_batch_size, config.memory.micro_batches
    if train is None:
        check_ranks(size, world_size=num_ranks)
    elif config.data.mixture is None:
        check_batch_size(train.num_samples, global_batch_size=size, world_size=num_ranks)
    else:
        num_samples = [manifest.num_samples for manifest in datasets_of(train)]
        weights, names = weights_of(config.data.mixture), list(config.data.mixture)
        check_mixture(num_samples, weights, names=names, global_batch_size=size, world_size=num_ranks)
    rank_batch_size = size // num_ranks
    if rank_batch_size % num_parts:
        raise UserError(
            f"memory.micro_batches {num_parts} does not divide the {rank_batch_size} samples of a batch on each of "
            f"{num_ranks} ranks; set memory.micro_batches={gcd(rank_batch_size, num_parts)}"
        )
    if config.encoder.batch_norm == "split":
        check_splits(config.encoder.batch_norm_splits, global_batch_size=size // num_parts, num_ranks=num_ranks)


def check_input_shape(config: RunConfig, *, height: int, width: int, where: str) -> None:
    """Raise `UserError` if views or encoder do not accept inputs of this shape; `where` names their dataset."""
    encoder = config.encoder.with_form(height=height, width=width)
    try:
        config.views.check_image_size(height=height, width=width)
        if config.data.mel is None:
            config.views.check_channels(encoder.in_channels)
        check_input_size(encoder, height=height, width=width)
        height, width = config.views.further_size(height=height, width=width)
        check_input_size(encoder, height=height, width=width)
    except InputSizeError as error:
        mend = "set another encoder.kind, its setting of the size, or another views.kind"
        raise UserError(f"{where}: {error}; {mend}") from None
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None


def check_batch_norm(config: RunConfig, *, height: int, width: int, num_ranks: int) -> None:
    """Raise `UserError` if a batch norm would get a single value of each channel, which has no deviation."""
    together = config.global_batch_size // config.memory.micro_batches
    trunk_rows, head_rows = {
        "synchronized": (together, together),
        "local": (together // num_ranks, together // num_ranks),
        "split": (together // config.encoder.batch_norm_splits, together),
    }[config.encoder.batch_norm]
    if min(trunk_rows, head_rows) > 1:
        return
    local = config.encoder.with_form(height=height, width=width).model_copy(update={"batch_norm": "local"})
    height, width = config.views.further_size(height=height, width=width)  # the smaller size, if there are two
    with torch.device("meta"):
        encoder = build_encoder(local).train()
        try:
            encoder.trunk(torch.zeros(trunk_rows, local.in_channels, height, width))
            encoder.head(torch.zeros(head_rows, encoder.pooled_size))
        except ValueError:
            raise UserError(
                f"batch norm needs at least two values of each channel, but {min(trunk_rows, head_rows)} sample of "
                f"{height} x {width} gives one; raise global_batch_size, or lower memory.micro_batches, the number of "
                "ranks or encoder.batch_norm_splits"
            ) from None


def _check_medium(config: RunConfig, train: Manifest) -> tuple[int, int]:
    """Return the height and width of the encoder's input. Raises `UserError` if the samples do not fit the config."""
    where, mel, rate = config.data.probed_dir, config.data.mel, config.data.sample_rate
    if train.sample_rate != rate:
        kind = "pictures" if train.sample_rate is None else f"sounds of {train.sample_rate} points a second"
        raise UserError(
            f"{where} holds {kind}, but data.sample_rate is {rate}; use a recipe for them, with "
            f"data.sample_rate={'null' if train.sample_rate is None else 'of_data'}"
        )
    if mel is not None and train.batch_shape != (mel.num_points,):
        raise UserError(
            f"{where} holds sounds of {train.batch_shape[0]} points but the spectrogram takes {mel.num_points}; "
            "set data.sample_rate=of_data and data.num_points=null"
        )
    if mel is None and (num_channels := train.batch_shape[0]) != config.encoder.in_channels:
        raise UserError(
            f"{where} holds pictures of {num_channels} channels, but encoder.in_channels is "
            f"{config.encoder.in_channels}; set encoder.in_channels={num_channels}"
        )
    return input_size(config, train.batch_shape)
