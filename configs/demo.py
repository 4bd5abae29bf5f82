"""The two runs of `make demo`: generated pictures with handwritten digits on them, minutes on two CPU cores.

As in the paper, another digit is drawn each time a picture is read, and loss and learning rate are the published ones.
Encoder and viewmaker are small, so that a run takes minutes. The probes are fitted on pictures without views, which
takes seconds and gives both runs the same untrained baseline. Batch norm is local, as in plain DDP. Synchronised over
two processes, it would send 48 messages in each step, which take as long as the step itself on a CPU.
"""

from __future__ import annotations

from configs.base import PUBLISHED_ADAM, PUBLISHED_SGD, changed
from trainer.adversary import AdversaryConfig
from trainer.config import RunConfig
from trainer.data import DataConfig
from trainer.models.encoder import ResNetConfig
from trainer.objectives import PublishedNTXentConfig
from trainer.probes.linear import ProbeConfig
from trainer.views.expert_image import ExpertImageConfig
from trainer.views.viewmaker import ViewmakerConfig


def expert() -> RunConfig:
    """SimCLR with expert views. Measured, 3 seeds: 26 % on the picture, 70 % on the digit; untrained 12 % and 60 %."""
    return RunConfig(
        name="demo-expert",
        data=DataConfig(train_dir="demo/data/train", test_dir="demo/data/test", num_workers=0, overlay="online"),
        views=ExpertImageConfig(),
        encoder=ResNetConfig(kind="resnet10", width=16, batch_norm="local"),
        objective=PublishedNTXentConfig(),
        optimizer=PUBLISHED_SGD,
        global_batch_size=64,
        num_epochs=4,
        probe=ProbeConfig(views="none", num_epochs=30),
    )


def viewmaker() -> RunConfig:
    """SimCLR with a small viewmaker. Measured, 3 seeds: 29 % on the picture, 84 % on the digit."""
    return changed(
        expert(),
        name="demo-viewmaker",
        views=ViewmakerConfig(base_width=8, num_res_blocks=1),
        adversary=AdversaryConfig(optimizer=PUBLISHED_ADAM),
    )
