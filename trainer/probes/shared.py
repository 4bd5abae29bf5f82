"""Count the test samples whose source is in the train set too, and refuse too many."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from data_pipeline.core.errors import UserError
from data_pipeline.core.sample import sample_key
from data_pipeline.storage.manifest import Manifest
from data_pipeline.storage.source_digests import SharedSources, read_source_digests, shared_sources
from data_pipeline.storage.store import SampleStore
from trainer.data import DataConfig
from trainer.mixture import TrainManifest, datasets_of


def check_shared(
    data: DataConfig, *, train: TrainManifest, test: Manifest, allowed: float
) -> tuple[int | None, str | None]:
    """Return how many test samples have their source in the train set too, and a sentence about them if some have.

    The number is None if it is not known. Raises `UserError` if they exceed the share `allowed` of the test samples, or
    if the digests or the index of a dataset cannot be read.
    """
    shared = _find_shared(data, train=train, test=test)
    if shared is None or shared.num_shared == 0:
        return None if shared is None else 0, None
    examples = " and ".join(f"sample {test} is sample {train} of the train set" for test, train in shared.examples)
    sentence = (
        f"{shared.num_shared} of the {shared.num_test} test samples of {data.test_dir} "
        f"({100 * shared.share:.3g} %) have their picture or sound in {data.train_name} too ({examples})"
    )
    if shared.share <= allowed:
        return shared.num_shared, sentence
    raise UserError(
        f"{sentence}, so test accuracy would partly measure training samples; build the test set from other pictures "
        "or sounds (after test_share, both splits need the same --root, --seed and test_share), or allow some of "
        "them, as a share of the test samples, with probe.allow_shared"
    )


def _find_shared(data: DataConfig, *, train: TrainManifest, test: Manifest) -> SharedSources | None:
    """Count the test samples whose source is in the train set too; None if a dataset does not record its sources.

    If both are the same dataset, all samples count. Of a mixture, the datasets that record their sources count. Tars of
    others record none: of them, the samples of tars that both sets name count.
    """
    manifests = datasets_of(train)
    if test.sha256 in {manifest.sha256 for manifest in manifests}:
        return SharedSources(test.num_samples, test.num_samples, (("00000000", "00000000"),))
    if not test.tars.numbered:
        return _shared_tars(data, manifests, test)
    found = [
        read_source_digests(location, manifest, remote=data.remote)
        for location, manifest in zip(data.train_locations.values(), manifests, strict=True)
    ]
    recorded = [digests_N for digests_N in found if digests_N is not None]
    test_M = read_source_digests(data.test_dir, test, remote=data.remote)
    return None if not recorded or test_M is None else shared_sources(np.concatenate(recorded), test_M)


def _shared_tars(data: DataConfig, train: Sequence[Manifest], test: Manifest) -> SharedSources | None:
    """Count the test samples in tars that the train set names too; None if there are none, which proves nothing."""
    locations = zip(data.train_locations.values(), train, strict=True)
    of_train = [_ranges(location, manifest, data) for location, manifest in locations if not manifest.tars.numbered]
    in_train = {name: samples for ranges in of_train for name, samples in ranges.items()}
    shared = {name: each for name, each in _ranges(data.test_dir, test, data).items() if name in in_train}
    first = [(name, samples) for name, samples in shared.items() if samples][:1]
    if not first:
        return None
    return SharedSources(
        test.num_samples,
        sum(map(len, shared.values())),
        tuple((sample_key(samples[0]), sample_key(in_train[name][0])) for name, samples in first),
    )


def _ranges(location: str, manifest: Manifest, data: DataConfig) -> dict[str, range]:
    return SampleStore(location, remote=data.remote, manifest=manifest, surveys=False).samples_by_tar()
