"""Probes on a GPU's tensors, without a GPU: the host waits once an epoch and not once a step, and memory is planned.

Tensors have a device, a shape and a type, but no data; see `tests/trainer/test_on_a_gpu.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from configs import resolve_recipe
from tests.old_versions import needs_gpu_tensors_without_data
from tests.tiny_data import write_tiny_pair, write_tiny_sound_pair
from tests.trainer.test_on_a_gpu import CUDA, Waits, on_the_gpu, tensors_without_data
from trainer.modules import build_modules
from trainer.probes import features, fitting, linear
from trainer.probes.features import Pictures, encode, read_pictures
from trainer.probes.fitting import fit
from trainer.probes.knn import knn_classes
from trainer.probes.linear import ProbeConfig, Target
from trainer.probes.targets import label_targets

CPU = torch.device("cpu")


def without_driver(outputs: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Stand in for `torch.autograd.grad`, which needs the driver of a GPU."""
    return [torch.zeros_like(each) for each in inputs]


class WaitsForFiniteNumbers(Waits):  # type: ignore[no-untyped-call]
    """Answers that features are finite, if it is asked."""

    def __torch_dispatch__(self, func: Any, *given: Any) -> Any:
        answer = super().__torch_dispatch__(func, *given)
        return True if answer is False else answer


class MovedInPlace:
    """Stands in for a copy of an overlay, which tensors without data do not allow."""

    def __init__(self, overlay: nn.Module) -> None:
        self._overlay = overlay

    def to(self, _: torch.device) -> nn.Module:
        on_the_gpu(self._overlay)
        return self._overlay


@pytest.fixture
def _without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.autograd, "grad", without_driver)
    monkeypatch.setattr(features, "copy", SimpleNamespace(deepcopy=MovedInPlace))
    monkeypatch.setattr(Target, "is_in_all", True)  # it is counted, and there is nothing to count
    monkeypatch.setattr(
        fitting, "neighbors_of", lambda targets, most: dict.fromkeys(targets, most // 25)
    )  # counted, too


def pair(directory: Path, num_train: int, overlay: Any = "online") -> tuple[Pictures, Pictures]:
    data = write_tiny_pair(directory, num_train=num_train, num_test=8, overlay=overlay)
    return read_pictures(data / "train"), read_pictures(data / "test")


@pytest.mark.slow
@needs_gpu_tensors_without_data
@pytest.mark.usefixtures("_without_a_gpu")
@pytest.mark.parametrize(("overlay", "views"), [("online", "policy"), ("baked", "none")])
def test_a_probe_waits_once_an_epoch_and_not_once_a_step(
    overlay: str, views: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "_MOST_STEPS", 2)
    free_on_the_gpu(monkeypatch, 1 << 30)
    modules = build_modules(resolve_recipe("debug:image", []))
    config = ProbeConfig(num_epochs=1, batch_size=4, views=views)
    found = []
    for num_train in (8, 24):
        train, test = pair(tmp_path / str(num_train), num_train, overlay)
        targets = label_targets(train, test)
        with tensors_without_data(allow_non_fake_inputs=True), WaitsForFiniteNumbers() as waits:
            for module in (modules.encoder, modules.view_policy):
                on_the_gpu(module)
            known, asked = train.on(CUDA), test.on(CUDA)
            assert known.samples.index_B.device == CUDA
            waits.found.clear()
            fit(
                modules.encoder,
                view_policy=modules.view_policy,
                train=known,
                test=asked,
                targets=targets,
                config=config,
                device=CUDA,
            )
        found.append(waits.found)
    assert found[0] == found[1] != []


@pytest.mark.parametrize("write", [write_tiny_pair, write_tiny_sound_pair])
def test_samples_and_overlays_are_copied_to_a_device(write: Any, tmp_path: Path) -> None:
    options = {"overlay": "online"} if write is write_tiny_pair else {}
    samples = read_pictures(write(tmp_path, num_train=8, num_test=4, **options) / "test")
    moved = samples.on(torch.device("meta"))
    for each, device in ((samples, "cpu"), (moved, "meta")):
        assert each.overlay is not None
        tensors = [*each.by_label.values(), *each.overlay.state_dict().values()]
        tensors += [value for value in vars(each.samples).values() if isinstance(value, Tensor)]
        assert {tensor.device.type for tensor in tensors} == {device}


@needs_gpu_tensors_without_data
@pytest.mark.usefixtures("_without_a_gpu")
def test_features_and_votes_wait_for_nothing() -> None:
    encoder = build_modules(resolve_recipe("debug:image", [])).encoder.eval()
    with tensors_without_data(), Waits() as waits:
        on_the_gpu(encoder)
        known_N, asked_M = (torch.empty(num, dtype=torch.int64, device=CUDA) for num in (40, 8))
        bank, asked = (torch.empty(num, 3, 16, 16, dtype=torch.uint8, device=CUDA) for num in (40, 8))
        waits.found.clear()
        bank_NC, asked_MC = (
            encode(lambda x_BCHW: [encoder.pooled(x_BCHW)], each, device=CUDA, batch_size=4)[0]
            for each in (bank, asked)
        )
        knn_classes(bank_NC, asked_MC, Target(known_N, asked_M, num_classes=3), num_neighbors=8, chunk_size=4)
    assert waits.found == []


def free_on_the_gpu(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (num_bytes, 1 << 40))


def test_features_go_to_the_host_if_the_gpu_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    with tensors_without_data():
        for num_bytes, device in ((800, CUDA), (799, CPU)):
            free_on_the_gpu(monkeypatch, num_bytes)
            assert features.empty_features((10, 10), dtype=torch.float32, device=CUDA).device == device


def test_memory_that_the_allocator_keeps_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second run that a process probes finds what the first has freed."""
    free_on_the_gpu(monkeypatch, 200)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 900)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 300)
    assert [features.fits_in_memory(num_bytes, CUDA) for num_bytes in (400, 401)] == [True, False]


def test_samples_stay_on_the_host_if_the_gpu_has_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_tiny_pair(tmp_path, num_train=8, num_test=4)
    train = read_pictures(data / "train")
    free_on_the_gpu(monkeypatch, 1000)
    assert train.on(CUDA) is train
