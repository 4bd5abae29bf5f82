"""Datasets that do not fit in memory: their probes give the numbers of the same data in memory, in little memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from configs import debug
from data_pipeline.building.build import build_dataset
from data_pipeline.building.index_tars import make_index
from data_pipeline.core.counter_rng import DrawKeys
from data_pipeline.core.errors import UserError
from data_pipeline.loading.decode import decode_ahead
from data_pipeline.loading.stream import ReadConfig
from data_pipeline.remote.cache import RemoteConfig
from data_pipeline.storage.locations import INDEX_NAME
from data_pipeline.storage.manifest import Fields
from data_pipeline.storage.store import SampleStore
from tests.gloo import run_ranks
from tests.nursery import PythonProcess
from tests.tiny_data import damage, write_tiny_dataset, write_tiny_pair
from tests.trainer.probed_runs.test_probe_command import call, make_run
from tests.trainer.test_tars import write_tars
from trainer.analyses.loaded_run import AnalysisOptions
from trainer.analyses.views import analyze_views
from trainer.modules import build_modules
from trainer.probed_runs.readout import probe
from trainer.probes import memory_limit
from trainer.probes.features import Pictures, extract, read_pictures
from trainer.probes.knn import nearest
from trainer.probes.memory_limit import MemoryLimit
from trainer.probes.result import read_result
from trainer.probes.view_batches import view_batches

CPU = torch.device("cpu")
NOTHING = MemoryLimit(max_bytes=0)  # streams every dataset, and puts all features into a file
PLENTY = MemoryLimit(max_bytes=1 << 40)
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


def read(directory: Path, memory: MemoryLimit, *, draw: int = 0) -> Pictures:
    return read_pictures(directory, read=READ, memory=memory, draw=draw)


def test_rows_labels_and_pictures_are_those_in_memory(data: Path) -> None:
    check_rows(data / "train")


@pytest.mark.parametrize("kind", ["bits", "dominoes"])
def test_rows_of_an_overlay_that_changes_the_shape_are_those_in_memory(kind: str, tmp_path: Path) -> None:
    """Also the labels of bits, which depend on the pictures."""
    build_dataset(f"procedural_{kind}", tmp_path / "data", limit=140, overlay="online")
    check_rows(tmp_path / "data")


def check_rows(directory: Path) -> None:
    resident, streamed = read(directory, PLENTY, draw=5), read(directory, NOTHING, draw=5)
    assert resident.streamed is None
    assert streamed.streamed is not None
    assert streamed.images_NCHW.shape == resident.images_NCHW.shape
    assert torch.equal(streamed.index_N, resident.index_N)
    assert streamed.by_label.keys() == resident.by_label.keys()
    for space in resident.by_label:
        assert torch.equal(streamed.labels(space), resident.labels(space))
    rows = torch.tensor([7, 0, 69, 7])
    assert torch.equal(streamed.images(rows), resident.images(rows))
    assert torch.equal(streamed.images(rows.view(2, 2)), resident.images(rows.view(2, 2)))
    everything = torch.arange(len(resident))
    assert torch.equal(streamed.images(everything), resident.images_NCHW)
    for found, expected in (
        (streamed.inputs(rows), resident.inputs(rows)),
        (streamed.redraw(rows, keys_of), resident.redraw(rows, keys_of)),
        (streamed.with_draw(2).inputs(rows), resident.with_draw(2).inputs(rows)),
    ):
        assert torch.equal(found.inputs, expected.inputs)
        assert found.masks_BHW is not None
        assert expected.masks_BHW is not None
        assert torch.equal(found.masks_BHW, expected.masks_BHW)
        assert all(torch.equal(found.labels[space], expected.labels[space]) for space in resident.by_label)
    for space in resident.by_label:
        assert torch.equal(streamed.with_draw(2).labels(space), resident.with_draw(2).labels(space))


def keys_of(index_B: torch.Tensor) -> DrawKeys:
    return DrawKeys(3, 1, index_B, 0)


def read_out(directory: Path, views: str, memory: MemoryLimit) -> Any:
    """Return the results and the heads of an untrained encoder."""
    recipe = debug.image()
    config = recipe.probe.model_copy(update={"num_epochs": 2, "batch_size": 32, "views": views, "learning_rate": 0.1})
    train, test = (read(directory / split, memory) for split in ("train", "test"))
    draws = [test.with_draw(1)] if test.is_drawn_online else []
    found = probe(build_modules(recipe), train=train, test=test, device=CPU, config=config, other_draws=draws)
    results = {space: result.model_dump(exclude={"seconds"}) for space, result in found.results.items()}
    heads = {space: (head.weight_KF.tolist(), head.bias_K.tolist()) for space, head in found.heads.by_label.items()}
    return results, heads


@pytest.mark.slow
@pytest.mark.parametrize("views", ["policy", "none"])
def test_probes_and_heads_are_those_of_data_in_memory_to_the_bit(data: Path, views: str) -> None:
    assert read_out(data, views, NOTHING) == read_out(data, views, PLENTY)


@pytest.mark.parametrize(("views", "num_train_read"), [("none", 70 + 70), ("policy", 70 + 2 * 64 + 70)])
def test_both_probes_share_one_reading_without_views(
    views: str, num_train_read: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One reading finds the samples that can be read. The fit on views reads two batches in each of its two epochs."""
    data = write_tiny_pair(tmp_path, num_train=70, num_test=30)
    expected, num_read = read_out(data, views, PLENTY), Counter[int]()

    def counted(store: SampleStore, *arguments: Any, **choices: Any) -> Iterator[Any]:
        for samples in decode_ahead(store, *arguments, **choices):
            num_read[len(store)] += len(samples)
            yield samples

    monkeypatch.setattr("trainer.probes.streamed_samples.decode_ahead", counted)
    assert read_out(data, views, NOTHING) == expected
    assert num_read == {70: num_train_read, 30: 2 * 30}


@pytest.mark.ranks
@pytest.mark.parametrize("views", ["policy", "none"])
def test_ranks_share_the_reading_and_agree(views: str, tmp_path: Path) -> None:
    data = write_tiny_pair(tmp_path, num_train=230, num_test=103, overlay="online")
    damage(data / "train", [5])
    alone = read_out(data, views, PLENTY)
    for world_size in (2, 3):
        for of_rank in run_ranks(read_out, world_size, data, views, NOTHING):
            assert of_rank == alone


def test_views_and_analyses_read_what_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_tiny_pair(tmp_path / "data", num_train=40, num_test=300)
    resident, streamed = read(data / "test", PLENTY), read(data / "test", NOTHING)
    policy, rows = build_modules(debug.image()).view_policy, torch.arange(300)
    found, expected = (
        [batch.views_BCHW for batch in view_batches(policy, pictures, rows, seed=1, view=0, device=CPU)]
        for pictures in (streamed, resident)
    )
    assert len(found) == 2
    assert torch.equal(torch.cat(found), torch.cat(expected))
    pages = []
    for free in (1 << 40, 0):
        monkeypatch.setattr(memory_limit, "free_host_bytes", lambda free=free: free)
        run_dir = make_run(tmp_path / f"run{free}", data)
        pages.append([path.read_bytes() for path in analyze_views(run_dir, options=AnalysisOptions(step=0))])
    assert pages[0] == pages[1]


@pytest.mark.slow
def test_the_command_streams_above_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_tiny_pair(tmp_path / "data", num_train=103, num_test=41)
    (scratch := tmp_path / "scratch").mkdir()
    runs = [make_run(tmp_path / name, data) for name in ("a", "b")]
    call(monkeypatch, runs[0].path)
    assert "does not fit in memory" not in capsys.readouterr().err
    call(monkeypatch, runs[1].path, "--memory-gigabytes", 0, "--scratch", scratch)
    said = capsys.readouterr().err
    assert "train does not fit in memory, and a probe on views reads it once in each of its" in said
    assert f"encode {data / 'test'}: 41/41" in said
    for label in ("base", "overlay"):
        a, b = (read_result(run.probes(10) / f"{label}.json").model_dump(exclude={"seconds"}) for run in runs)
        assert a == b
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("bank_at_once", [1, 7, 64, 500])
def test_neighbours_found_in_parts_of_the_bank_are_the_nearest(bank_at_once: int) -> None:
    draw = torch.Generator().manual_seed(0)
    bank_NC, queries_BC = torch.randn(150, 12, generator=draw), torch.randn(31, 12, generator=draw)
    for num in (1, 20, 200):
        whole, parts = (
            [
                each_BR.sort(1).values
                for each_BR in nearest(bank_NC, queries_BC, num_neighbors=num, bank_at_once=at_once)
            ]
            for at_once in (None, bank_at_once)
        )
        torch.testing.assert_close(parts[0], whole[0], rtol=0, atol=1e-6)
        assert torch.equal(parts[1], whole[1])


def test_a_sample_that_is_damaged_while_it_is_read_ends_the_probe(tmp_path: Path) -> None:
    directory = write_tiny_dataset(tmp_path / "data", num_samples=40)
    pictures = read(directory, NOTHING)
    damage(directory, [21])
    with pytest.raises(UserError, match=r"00000021 in shard-00001.tar could be read before and cannot be read now"):
        pictures.images(torch.tensor([20, 21]))


def test_too_many_bad_samples_are_refused_as_in_memory(tmp_path: Path) -> None:
    directory = write_tiny_dataset(tmp_path / "data", num_samples=40)
    damage(directory, range(10))
    for memory in (NOTHING, PLENTY):
        with pytest.raises(UserError, match=r"10 of 40 samples .* cannot be read"):
            read(directory, memory)


def test_a_cache_that_is_too_small_for_an_epoch_in_another_order_is_named(tmp_path: Path) -> None:
    directory = write_tiny_dataset(tmp_path / "data", num_samples=64, num_samples_per_shard=8)
    remote = RemoteConfig(cache_dir=str(tmp_path / "cache"), cache_gigabytes=1e-4)
    streamed = read_pictures(f"file://{directory}", read=ReadConfig(remote=remote), memory=NOTHING)
    features_NF = extract(lambda x_BCHW: x_BCHW.flatten(1), streamed, device=CPU)
    assert torch.equal(features_NF, read(directory, PLENTY).images_NCHW.flatten(1).float() / 255)
    with pytest.raises(UserError, match=r"raise data.remote.cache_gigabytes, or probe with --views none"):
        list(streamed.ahead([torch.tensor([60, 1])], title="epoch"))


# The file for what does not fit


def test_a_file_takes_what_memory_does_not_hold(tmp_path: Path) -> None:
    memory = MemoryLimit(max_bytes=1_000, scratch=tmp_path)
    small, large = (memory.empty((rows, 10), dtype=torch.float32, device=CPU) for rows in (25, 26))
    large.copy_(torch.arange(260.0).view(26, 10))
    assert small.shape == (25, 10)
    assert large[25, 9] == 259
    assert list(tmp_path.iterdir()) == []
    mapped = Path("/proc/self/maps").read_text().splitlines()
    assert sum(str(tmp_path) in line for line in mapped) == 1


def test_a_disk_without_room_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(UserError, match=r"fit neither in memory nor in .*No space left.*--scratch"):
        MemoryLimit(0, tmp_path).empty((1000, 10), dtype=torch.float32, device=CPU)
    with pytest.raises(UserError, match=r"nor in .*nowhere \(No such file or directory\)"):
        MemoryLimit(0, tmp_path / "nowhere").empty((1000, 10), dtype=torch.float32, device=CPU)


_ENCODE = """
import sys, threading, time, torch
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from trainer.probes.features import extract, read_pictures
from trainer.probes.memory_limit import MemoryLimit

directory, scratch, max_bytes, seconds = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

def measure():
    global peak
    while True:
        peak = max(peak, anonymous())
        time.sleep(0.002)

def features(part):
    time.sleep(seconds)
    print("encoded", flush=True)
    return part.flatten(1).repeat(1, 4)

torch.zeros(1000) @ torch.zeros(1000)
before = peak = anonymous()
threading.Thread(target=measure, daemon=True).start()
memory = MemoryLimit(max_bytes, scratch)
pictures = read_pictures(directory, memory=memory)
features_NF = extract(features, pictures, device=torch.device("cpu"))
total = sum(part.sum(dtype=torch.float64).item() for part in torch.split(features_NF, 100))
print("sum", total, "peak", peak - before)
"""


def encode(directory: Path, scratch: Path, *, max_bytes: int, seconds: float = 0) -> PythonProcess[str]:
    arguments = [sys.executable, "-c", _ENCODE, str(directory), str(scratch), str(max_bytes), str(seconds)]
    return PythonProcess(arguments, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3])


@pytest.mark.process
@pytest.mark.slow
def test_memory_stays_below_the_limit(tmp_path: Path) -> None:
    """The pictures take 25 MB, and their features 393 MB."""
    directory = write_tiny_dataset(tmp_path / "data", num_samples=8_000, overlay="online", num_samples_per_shard=1_000)
    found = {}
    for max_bytes in (1 << 40, 1 << 20):
        with encode(directory, tmp_path, max_bytes=max_bytes) as process:
            assert process.stdout is not None
            found[max_bytes] = process.stdout.read().split()[-3:]
        assert process.returncode == 0
    (expected, _, resident), (total, _, streamed) = found[1 << 40], found[1 << 20]
    assert total == expected
    assert int(resident) > 400e6
    assert int(streamed) < 60e6


@pytest.mark.process
def test_a_probe_that_is_killed_leaves_nothing_and_is_simply_run_again(tmp_path: Path) -> None:
    directory = write_tiny_dataset(tmp_path / "data", num_samples=600)
    (scratch := tmp_path / "scratch").mkdir()
    with encode(directory, scratch, max_bytes=0, seconds=1) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "encoded\n"
        assert process.stdout.readline() == "encoded\n"
        deadline = time.monotonic() + 20
        maps = Path(f"/proc/{process.pid}/maps")
        while str(scratch) not in maps.read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert str(scratch) in maps.read_text()  # the features lie in a file
        process.send_signal(signal.SIGKILL)
    assert list(scratch.iterdir()) == []
    with encode(directory, scratch, max_bytes=0) as process:
        assert process.stdout is not None
        total = float(process.stdout.read().split()[-3])
    images = read(directory, PLENTY).images_NCHW
    assert total == pytest.approx(4 * images.sum(dtype=torch.float64).item() / 255, rel=1e-6)
