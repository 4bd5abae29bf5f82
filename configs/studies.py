"""Studies: runs that are compared with one another. A study is a function that returns their RunConfigs.

python launch/slurm.py --study studies:table1 --at-a-time 4 --gpus-per-node 8
python launch/status.py runs/table1

Each run has a directory of its own, runs/STUDY/NAME-seedSEED, for `python -m trainer.report runs/STUDY/*`.
"""

from __future__ import annotations

from configs import debug, simclr, viewmaker
from trainer.config import RunConfig


def table1() -> list[RunConfig]:
    """Table 1 of Tamkin et al. (2022): expert views and a viewmaker, without an overlay and with each of three."""
    players = (simclr, viewmaker)
    return [recipe() for player in players for recipe in (player.cifar10, player.shapes, player.digits, player.letters)]


def debug_seeds() -> list[RunConfig]:
    """Expert views and a viewmaker with two seeds each, on the data of debug.py; a minute on a CPU."""
    recipes = (debug.image(), debug.viewmaker())
    return [recipe.model_copy(update={"seed": seed}) for recipe in recipes for seed in (0, 1)]
