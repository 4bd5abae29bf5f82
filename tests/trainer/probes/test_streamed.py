"""Datasets that do not fit in memory: their probes give the numbers of the same data in memory, in little memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from configs import debug
from data_pipeline.building.build import build_dataset
from data_pipeline.building.index_tars import make_index
from data_pipeline.core.counter_rng import DrawKeys
from data_pipeline.core.errors import UserError
from data_pipeline.loading import placement
from data_pipeline.loading.decode import decode_ahead
from data_pipeline.loading.stream import ReadConfig
from data_pipeline.storage.locations import INDEX_NAME
from data_pipeline.storage.manifest import Fields
from data_pipeline.storage.store import SampleStore
from tests.gloo import run_ranks
from tests.tiny_data import damage, write_tiny_dataset, write_tiny_pair
from tests.trainer.probed_runs.test_probe_command import make_run
from tests.trainer.probes.toy import read_out
from tests.trainer.test_tars import write_tars
from trainer.analyses.analysis import LoadedRun
from trainer.analyses.views import ANALYSIS, ViewsAnalysisConfig
from trainer.modules import build_modules
from trainer.probes import features
from trainer.probes.features import Pictures, read_pictures
from trainer.probes.streamed_samples import StreamedSamples
from trainer.probes.view_batches import view_batches

CPU = torch.device("cpu")
READ = ReadConfig(max_bad_share=0.05)


def write_indexed_tars(directory: Path) -> Path:
    write_tars(directory / "train", 70, sizes=((40, 30), (33, 48)), kind="JPEG")
    write_tars(directory / "test", 31, sizes=((40, 30), (33, 48)), kind="JPEG", seed=1)
    make_index(str(directory / "train"), directory / "train" / INDEX_NAME, fields=Fields(), size=16)
    make_index(
        str(directory / "test"),
        directory / "test" / INDEX_NAME,
        fields=Fields(),
        size=16,
        classes_of=directory / "train",
    )
    return directory


@pytest.fixture(scope="module", params=["baked", "online", "none", "tars"])
def data(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A train set of more than one chunk of 128 with two damaged samples, and a test set."""
    directory = tmp_path_factory.mktemp("data")
    if request.param == "tars":
        return write_indexed_tars(directory)
    write_tiny_pair(directory, num_train=150, num_test=41, overlay=request.param)
    damage(directory / "train", [3, 140])
    return directory


def read(directory: Path | str, *, streams: bool, draw: int = 0, config: ReadConfig = READ) -> Pictures:
    """Read a dataset, and stream it as if it did not fit in memory."""
    with mock.patch.object(features, "resident_bytes", return_value=1 << 60 if streams else 0):
        return read_pictures(directory, read=config, draw=draw)


def test_rows_labels_and_pictures_are_those_in_memory(data: Path) -> None:
    check_rows(data / "train")


@pytest.mark.parametrize("kind", ["bits", "dominoes"])
def test_rows_of_an_overlay_that_changes_the_shape_are_those_in_memory(kind: str, tmp_path: Path) -> None:
    """Also the labels of bits, which depend on the pictures."""
    build_dataset(f"procedural_{kind}", tmp_path / "data", limit=140, overlay="online")
    check_rows(tmp_path / "data")


def check_rows(directory: Path) -> None:
    resident, streamed = (read(directory, streams=streams, draw=5) for streams in (False, True))
    assert not isinstance(resident.samples, StreamedSamples)
    assert isinstance(streamed.samples, StreamedSamples)
    assert torch.equal(streamed.samples.index_B, resident.samples.index_B)
    assert streamed.by_label.keys() == resident.by_label.keys()
    for space in resident.by_label:
        assert torch.equal(streamed.by_label[space], resident.by_label[space])
    rows = torch.tensor([7, 0, 69, 7])
    assert torch.equal(streamed.images(rows), resident.images(rows))
    assert torch.equal(streamed.images(rows.view(2, 2)), resident.images(rows.view(2, 2)))
    everything = torch.arange(len(resident))
    images_NCHW = resident.images(everything)
    assert torch.equal(streamed.images(everything), images_NCHW)
    assert resident.size == images_NCHW.shape[2:]
    for found, expected in (
        (streamed.inputs(rows), resident.inputs(rows)),
        (streamed.inputs(rows, keys_of), resident.inputs(rows, keys_of)),
    ):
        assert torch.equal(found.inputs_a, expected.inputs_a)
        assert found.masks_BHW is not None
        assert expected.masks_BHW is not None
        assert torch.equal(found.masks_BHW, expected.masks_BHW)
        assert all(torch.equal(found.labels[space], expected.labels[space]) for space in resident.by_label)


def keys_of(index_B: torch.Tensor) -> DrawKeys:
    return DrawKeys(3, 1, index_B, 0)


def results_of(directory: Path, views: str, streams: bool) -> Any:
    """Return the results and the heads of an untrained encoder."""
    train, test = (read(directory / split, streams=streams) for split in ("train", "test"))
    return read_out(train, test, views=views, batch_size=32)


@pytest.mark.parametrize(("views", "num_train_read"), [("none", 70 + 70), ("policy", 70 + 2 * 64 + 70)])
def test_both_probes_share_one_reading_without_views(
    views: str, num_train_read: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One reading finds the samples that can be read. The fit on views reads two batches in each of its two epochs.

    The results and the heads have the bits of data in memory.
    """
    data = write_tiny_pair(tmp_path, num_train=70, num_test=30)
    expected, num_read = results_of(data, views, False), Counter[int]()

    def counted(store: SampleStore, *arguments: Any, **choices: Any) -> Iterator[Any]:
        for samples in decode_ahead(store, *arguments, **choices):
            num_read[len(store)] += len(samples)
            yield samples

    monkeypatch.setattr("trainer.probes.streamed_samples.decode_ahead", counted)
    assert results_of(data, views, True) == expected
    assert num_read == {70: num_train_read, 30: 2 * 30}


@pytest.mark.ranks
def test_ranks_share_the_reading_and_agree(tmp_path: Path) -> None:
    data = write_tiny_pair(tmp_path, num_train=100, num_test=31, overlay="online")
    damage(data / "train", [5])
    alone = results_of(data, "policy", False)
    assert run_ranks(results_of, 3, data, "policy", True) == [alone] * 3


def test_views_and_analyses_read_what_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.probes.view_batches._BATCH_SIZE", 16)
    data = write_tiny_pair(tmp_path / "data", num_train=4, num_test=30)
    resident, streamed = (read(data / "test", streams=streams) for streams in (False, True))
    policy, rows = build_modules(debug.image()).view_policy, torch.arange(30)
    found, expected = (
        [batch.views_BCHW for batch in view_batches(policy, pictures, rows, seed=1, view=0, device=CPU)]
        for pictures in (streamed, resident)
    )
    assert len(found) == 2
    assert torch.equal(torch.cat(found), torch.cat(expected))
    pages = []
    for num_bytes in (0, 1 << 60):
        monkeypatch.setattr(features, "resident_bytes", lambda _, num_bytes=num_bytes: num_bytes)
        run_dir = make_run(tmp_path / f"run{num_bytes}", data)
        pages.append(
            [path.read_bytes() for path in ANALYSIS.analyze([LoadedRun(run_dir, step=0)], config=ViewsAnalysisConfig())]
        )
    assert pages[0] == pages[1]


def test_a_sample_that_is_damaged_while_it_is_read_ends_the_probe(tmp_path: Path) -> None:
    directory = write_tiny_dataset(tmp_path / "data", num_samples=40)
    pictures = read(directory, streams=True)
    damage(directory, [21])
    with pytest.raises(UserError, match=r"00000021 in shard-00001.tar could be read before and cannot be read now"):
        pictures.images(torch.tensor([20, 21]))


def test_too_many_bad_samples_are_refused_as_in_memory(tmp_path: Path) -> None:
    directory = write_tiny_dataset(tmp_path / "data", num_samples=40)
    damage(directory, range(10))
    for streams in (True, False):
        with pytest.raises(UserError, match=r"10 of 40 samples .* cannot be read"):
            read(directory, streams=streams)


def test_features_that_fit_nowhere_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "free_host_bytes", lambda: 2_000)
    assert features.empty_features((25, 10), dtype=torch.float32, device=CPU).shape == (25, 10)
    with pytest.raises(UserError, match="more than half of the free memory"):
        features.empty_features((26, 10), dtype=torch.float32, device=CPU)
