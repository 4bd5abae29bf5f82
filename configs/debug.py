"""Runs that take seconds on a CPU, for debugging with torchrun and for tests. They are too short to learn anything.

python -m data_pipeline build procedural_digits --out data/debug/train --limit 256
python -m data_pipeline build procedural_digits --out data/debug/test --split test --limit 128
torchrun --standalone --nproc-per-node 2 launch/train.py --config debug:image

python -m data_pipeline build spoken_noise --source procedural --overlay online --out data/debug_audio/train --limit 256
python -m data_pipeline build spoken_noise --source procedural --overlay online --out data/debug_audio/test \
       --split test --limit 128
torchrun --standalone --nproc-per-node 2 launch/train.py --config debug:audio
"""

from __future__ import annotations

from configs.base import CIFAR10_MEAN, CIFAR10_STD, changed, data
from trainer.adversary import AdversaryConfig
from trainer.config import RunConfig
from trainer.models.encoder import ResNetConfig
from trainer.objectives import NTXentConfig
from trainer.probes.linear import ProbeConfig
from trainer.views.expert_audio import SpectralConfig
from trainer.views.expert_image import ExpertImageConfig
from trainer.views.viewmaker import ViewmakerConfig


def image() -> RunConfig:
    """SimCLR with expert views, a tiny encoder, 16 steps; about 5 seconds on 2 cores."""
    return RunConfig(
        name="debug-image",
        data=data("debug", num_workers=1),
        views=ExpertImageConfig(),
        encoder=ResNetConfig(kind="resnet10", width=4, embedding_size=16, mean=CIFAR10_MEAN, std=CIFAR10_STD),
        objective=NTXentConfig(),
        global_batch_size=32,
        num_epochs=2,
        checkpoint_every_steps=4,
        log_every_steps=1,
        probe=ProbeConfig(num_epochs=5),
    )


def viewmaker() -> RunConfig:
    """SimCLR with a tiny viewmaker instead of expert views, 16 steps; about 10 seconds on 2 cores."""
    views = ViewmakerConfig(base_width=4, num_res_blocks=1)
    return changed(image(), name="debug-viewmaker", views=views, adversary=AdversaryConfig())


def audio() -> RunConfig:
    """SimCLR on sounds with views of their spectrograms, a tiny encoder, 16 steps; about 10 seconds on 2 cores."""
    return changed(
        image(),
        name="debug-audio",
        data=data("debug_audio", num_workers=1, overlay="online_per_view", sample_rate=8_000),
        views=SpectralConfig(),
        encoder=ResNetConfig(kind="resnet10", width=4, embedding_size=16, in_channels=1, mean=(0.0,), std=(1.0,)),
    )


def audio_viewmaker() -> RunConfig:
    """SimCLR on sounds with a tiny viewmaker on their spectrograms, 16 steps; about 30 seconds on 2 cores."""
    return changed(
        audio(),
        name="debug-audio-viewmaker",
        views=ViewmakerConfig(base_width=4, num_res_blocks=1, budget=0.125, clamp=False),
        adversary=AdversaryConfig(),
    )
