"""Probes and analyses of sounds get the input of training, and read audible features."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from data_pipeline.audio.log_mel import FSDD
from data_pipeline.core.counter_rng import DrawKeys
from data_pipeline.loading.stream import ReadConfig, Stream
from data_pipeline.loading.whole import read_all
from tests.tiny_data import write_tiny_sound_pair, write_tiny_sounds
from trainer.probes.features import read_pictures
from trainer.probes.fitting import fit
from trainer.probes.linear import ProbeConfig, accuracy
from trainer.probes.targets import label_targets
from trainer.views.expert_audio import Spectral, SpectralConfig, clean_spectrogram

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_sound_pair(tmp_path_factory.mktemp("sounds"), num_train=97, num_test=41)


class Bands(nn.Module):
    """An encoder with the loudest value of each mel band, which tells tones and background sounds apart."""

    def features_and_pooled(self, views_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        assert views_BCHW.shape[1:] == (1, 64, 64)
        return views_BCHW.amax((1, 3)), views_BCHW.amax((1, 3))


@pytest.mark.slow
def test_what_is_read_is_the_spectrogram_of_what_an_evaluation_reads(data: Path) -> None:
    pictures = read_pictures(data / "train", draw=3)
    batches = list(read_all(data / "train", batch_size=16, draw=3))
    waveforms_NT, index_N = (torch.cat([getattr(batch, name) for batch in batches]) for name in ("inputs_a", "index_B"))
    base_N, overlay_N = (torch.cat([batch.labels[name] for batch in batches]) for name in ("base", "overlay"))
    images_NCHW = pictures.images(torch.arange(len(pictures)))
    torch.testing.assert_close(images_NCHW, clean_spectrogram(waveforms_NT, FSDD), rtol=1e-5, atol=1e-5)
    assert images_NCHW.dtype == torch.float32
    assert pictures.size == images_NCHW.shape[2:]
    assert torch.equal(pictures.samples.index_B, index_N)
    assert torch.equal(pictures.by_label["base"], base_N)
    assert torch.equal(pictures.by_label["overlay"], overlay_N)
    rows = torch.tensor([5, 2, 30])
    assert torch.equal(pictures.inputs(rows).inputs_a, waveforms_NT[rows])
    assert pictures.inputs(rows).masks_BHW is None


@pytest.mark.slow
def test_a_redraw_has_the_crop_and_the_background_that_training_would_draw(data: Path) -> None:
    pictures = read_pictures(data / "train")
    [batch] = Stream(
        data / "train", read=ReadConfig(num_workers=0), global_batch_size=97, seed=5, rank=0, world_size=1, end_step=1
    )
    order = batch.index_B
    redrawn = pictures.inputs(order, lambda index_B: DrawKeys(seed=5, epoch=0, index_B=index_B, view=0))
    assert torch.equal(redrawn.inputs_a, batch.inputs_a)
    assert torch.equal(redrawn.labels["overlay"], batch.labels["overlay"])
    assert torch.equal(redrawn.labels["base"], batch.labels["base"])
    assert not torch.equal(redrawn.labels["overlay"], pictures.by_label["overlay"][order])


def test_sounds_with_the_background_baked_in_and_without_one(tmp_path: Path) -> None:
    for overlay, num_classes in (("baked", 3), ("none", 0)):
        directory = write_tiny_sounds(tmp_path / overlay, num_samples=20, overlay=overlay)  # type: ignore[arg-type]
        pictures = read_pictures(directory)
        assert len(pictures.class_names("overlay")) == num_classes
        rows = torch.arange(20)
        redrawn = pictures.inputs(rows, lambda index_B: DrawKeys(seed=0, epoch=9, index_B=index_B, view=4))
        assert redrawn.labels.keys() == pictures.by_label.keys()
        assert all(torch.equal(redrawn.labels[name], label_N) for name, label_N in pictures.by_label.items())


@pytest.mark.slow
def test_what_can_be_heard_is_read_out(data: Path) -> None:
    """A deep or high tone is read from views, the background from sounds without views. Both have their own bands."""
    train, test = read_pictures(data / "train"), read_pictures(data / "test")
    targets = label_targets(train, test)
    for views in ("policy", "none"):
        results = fit(
            Bands(),
            view_policy=Spectral(SpectralConfig(max_masked_bands=0), FSDD),
            train=train,
            test=test,
            targets=targets,
            config=ProbeConfig(num_epochs=10, batch_size=16, learning_rate=0.1, views=views),
            device=CPU,
        )
        assert results["base"].linear.accuracy > 0.9
        assert results["overlay"].linear.accuracy > 0.9
        assert accuracy(results["base"].predicted["knn"], results["base"].target.test_N) > 0.9
