"""Spoken digits with a background sound: Table 2 of Tamkin et al. (2022), one function for each cell.

The encoder is torchvision's ResNet-18 on spectrograms of 64 bands and 64 frames. Batches have 128 sounds, as in the
published code; the paper says 256. Training takes 200 epochs. The learning rates of training and probe are constant.

The published code mixes another background sound into each view (`noise_per_view`, here data.overlay=online_per_view),
so the views do not share the second feature. Use `--set data.overlay=online` for one background for both views. The
published viewmaker of sounds works after a crop and noise on the waveform, which the paper does not mention: use
`--set views.waveform={}`.
`..._speech` and `..._sound` have only speech or only backgrounds. The paper does not say how it removed the speech;
here silence replaces it. Build the shards first:

    python -m data_pipeline papers --root DIR --out data
    torchrun --standalone --nproc-per-node 8 launch/train.py --config audio:spectral

With `--source fsdd` the sounds have 8,000 points a second: add `--set data.sample_rate=of_data`. This is not the
dataset of the paper, and its numbers differ. The recipes `folder...` are for your own sounds.
"""

from __future__ import annotations

from configs.base import NAME_OF_DATA, PUBLISHED_ADAM, PUBLISHED_SGD, changed, data, named
from trainer.adversary import AdversaryConfig
from trainer.config import RunConfig
from trainer.models.encoder import ResNetConfig
from trainer.objectives import PublishedNTXentConfig
from trainer.probes.linear import ProbeConfig
from trainer.views import ViewsConfig
from trainer.views.expert_audio import SpectralConfig, WaveformConfig
from trainer.views.viewmaker import ViewmakerConfig


def spectral() -> RunConfig:
    """Masks and noise on the spectrogram. Published: 10.1 % on the digit, 47.2 % on the background."""
    return _published("spectral", SpectralConfig())


def waveform() -> RunConfig:
    """Crop and noise on the waveform. Published: 53.6 % on the digit, 43.3 % on the background."""
    return _published("waveform", WaveformConfig())


def viewmaker() -> RunConfig:
    """A viewmaker on the spectrogram. Published: 60.8 % on the digit, 97.0 % on the background."""
    return _published("viewmaker", ViewmakerConfig(budget=0.125, clamp=False))


def spectral_speech() -> RunConfig:
    """Masks and noise on the spectrogram, speech alone. Published: 97.0 % on the digit."""
    return _on("spoken", spectral())


def waveform_speech() -> RunConfig:
    """Crop and noise on the waveform, speech alone. Published: 76.7 % on the digit."""
    return _on("spoken", waveform())


def viewmaker_speech() -> RunConfig:
    """A viewmaker on the spectrogram, speech alone. Published: 92.4 % on the digit."""
    return _on("spoken", viewmaker())


def spectral_sound() -> RunConfig:
    """Masks and noise on the spectrogram, background sounds alone. Published: 32.64 % on the background (chance)."""
    return _on("noise", spectral())


def waveform_sound() -> RunConfig:
    """Crop and noise on the waveform, background sounds alone. Published: 100.0 % on the background."""
    return _on("noise", waveform())


def viewmaker_sound() -> RunConfig:
    """A viewmaker on the spectrogram, background sounds alone. Published: 100.0 % on the background."""
    return _on("noise", viewmaker())


def folder() -> RunConfig:
    """Your own sounds of any rate and length: --set data.train_dir=DIR --set data.test_dir=DIR. For a GPU.

    Masks and noise on the spectrogram; the settings are from Table 2 of Tamkin et al. The run takes the name of its
    data folder. docs/data.md says how sounds are built.
    """
    shards = data("sounds", overlay="online", sample_rate="of_data")
    return changed(spectral(), name=f"audio-{NAME_OF_DATA}", data=shards)


def folder_small() -> RunConfig:
    """Your own sounds for a CPU: ResNet-10 of width 16, small batches and fewer epochs."""
    return changed(
        folder(),
        name=f"audio-{NAME_OF_DATA}-small",
        data=data("sounds", num_workers=0, overlay="online", sample_rate="of_data"),
        encoder=ResNetConfig(kind="resnet10", width=16, in_channels=1, mean=(0.0,), std=(1.0,)),
        global_batch_size=64,
        num_epochs=20,
        probe=ProbeConfig(views="none", num_epochs=30),
    )


def folder_speed_and_pitch() -> RunConfig:
    """Your own sounds with crop, noise and changes of speed and pitch. For a GPU.

    The published code changes neither speed nor pitch. The ranges come from Ko et al. 2015 (speed, 0.9 to 1.1) and from
    WavAugment (Kharitonov et al. 2021: 300 cents up or down).
    """
    return changed(
        folder(), name=f"audio-waveform-{NAME_OF_DATA}", views=WaveformConfig(speed=(0.9, 1.1), semitones=(-3, 3))
    )


def folder_viewmaker() -> RunConfig:
    """Your own sounds with a viewmaker on the spectrogram. For a GPU."""
    return changed(viewmaker(), name=f"audio-viewmaker-{NAME_OF_DATA}", data=folder().data)


def folder_viewmaker_small() -> RunConfig:
    """Your own sounds with a viewmaker of width 8 and one block, for a CPU."""
    views = ViewmakerConfig(budget=0.125, clamp=False, base_width=8, num_res_blocks=1)
    small, name = folder_small(), f"audio-viewmaker-{NAME_OF_DATA}-small"
    return changed(small, name=name, views=views, adversary=viewmaker().adversary)


def _on(dataset: str, recipe: RunConfig) -> RunConfig:
    """Return the recipe on another dataset of sounds, without a background for each view if there is only speech."""
    overlay = "online" if dataset == "spoken" else recipe.data.overlay
    shards = data(dataset, overlay=overlay, sample_rate=recipe.data.sample_rate)
    return named(recipe, dataset, data=shards)


def _published(name: str, views: ViewsConfig) -> RunConfig:
    return RunConfig(
        name=f"audio-{name}",
        seed=1337,
        data=data("spoken_noise", overlay="online_per_view", sample_rate=48_000),
        views=views,
        encoder=ResNetConfig(kind="resnet18", in_channels=1, mean=(0.0,), std=(1.0,)),
        objective=PublishedNTXentConfig(),
        optimizer=PUBLISHED_SGD,
        adversary=AdversaryConfig(optimizer=PUBLISHED_ADAM) if views.is_learned else None,
        global_batch_size=128,
        num_epochs=200,
        probe=ProbeConfig(batch_size=256, milestones=()),
    )
