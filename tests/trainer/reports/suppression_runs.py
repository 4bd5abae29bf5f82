"""Run directories of a suppression study with chosen accuracies, as training, probe and analysis leave them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from configs import debug
from trainer.analyses.monitors import Monitors, MonitorsConfig, MonitorsResult
from trainer.config import RunConfig
from trainer.probes.groups import Groups, WorstGroup
from trainer.probes.knn import KNNResult
from trainer.probes.linear import LinearResult, ProbeConfig
from trainer.probes.result import ProbeResult
from trainer.probes.right_samples import pack_right
from trainer.run_dir import RunDir, write_json

STEP = 40
PROBE = ProbeConfig(num_epochs=20, views="none")


def make_run(
    home: Path,
    factors: Mapping[str, str],
    *,
    seed: int = 0,
    right: Mapping[str, NDArray[np.bool_]] | None = None,
    untrained: Mapping[str, NDArray[np.bool_]] | None = None,
    is_finished: bool = True,
    has_bits: bool = True,
    rank_me: float | None = None,
    groups: Mapping[str, Groups] | None = None,
    test_set: str = "b",
    trained_on: str = "a",
    probe: ProbeConfig = PROBE,
    **settings: Any,
) -> Path:
    """Make a run whose probes get the samples `right` (by label) right, and return its directory."""
    value = debug.image().model_dump() | {"seed": seed, "probe": probe.model_dump()} | settings
    value["tracking"] |= {"factors": dict(factors), "wandb": "disabled"}
    config = RunConfig.model_validate(value)
    run_dir = RunDir(home / f"{re.sub(r'[^A-Za-z0-9-]', '_', '-'.join(factors.values()))}-seed{seed}")
    run_dir.path.mkdir(parents=True)
    write_json(run_dir.config, config.model_dump(mode="json"))
    provenance = {"seed": seed, "train_manifest_sha256": trained_on * 64}
    write_json(run_dir.provenance, provenance | ({"finished_step": STEP} if is_finished else {}))
    for step, of_step in ((0, untrained), (STEP, right)):
        for label, right_N in (of_step or {}).items():
            of_label = (groups or {}).get(label)
            result = probe_result(label, step, right_N, has_bits=has_bits, test_set=test_set, probe=probe)
            result |= {"groups": [] if of_label is None else [of_label.model_dump(mode="json")]}
            write_json(run_dir.probes(step) / f"{label}.json", result)
    if rank_me is not None:
        spaces = {name: monitors(rank_me) for name in ("embedding", "pooled")}
        found = MonitorsResult(
            config=MonitorsConfig(),
            seed=seed,
            checkpoint_step=STEP,
            num_samples=100,
            spaces=spaces,
            test_manifest_sha256="b" * 64,
        )
        write_json(run_dir.analysis / "monitors.json", found.model_dump(mode="json"))
    return run_dir.path


def monitors(rank_me: float) -> Monitors:
    return Monitors(num_dimensions=64, rank_me=rank_me, lidar=rank_me / 2, alpha=1.0, eigenvalues=(1.0, 0.5))


def probe_result(
    label: str, step: int, right_N: NDArray[np.bool_], *, has_bits: bool, test_set: str, probe: ProbeConfig
) -> dict[str, Any]:
    accuracy = float(right_N.mean())
    bits = pack_right(torch.from_numpy(right_N.astype(np.int64)), torch.ones(len(right_N), dtype=torch.int64))
    return ProbeResult(
        label=label,
        checkpoint_step=step,
        linear=LinearResult(
            accuracy=accuracy,
            best_accuracy=accuracy,
            best_epoch=1,
            accuracy_by_epoch=(accuracy,),
            train_accuracy_by_epoch=(accuracy,),
        ),
        knn=KNNResult(accuracy=accuracy, num_neighbors=200, temperature=0.1),
        chance=0.1,
        majority_share=0.113,
        class_names=tuple("0123456789"),
        num_train=8000,
        num_test=len(right_N),
        probe_config=probe.protocol,
        train_manifest_sha256="a" * 64,
        test_manifest_sha256=test_set * 64,
        seconds=1.0,
        title={"base": "digit", "overlay": "bits"}.get(label),
        right_samples={"linear": bits} if has_bits and bits is not None else {},
    ).model_dump(mode="json")


def worst_groups(accuracy: float, *, num_test: int = 40, name: str = "cat") -> Groups:
    """Return groups of two classes each, of which the pair (`name`, 3) is the worst."""
    return Groups(
        labels=("base", "overlay"),
        num_test=((num_test, num_test), (num_test, num_test)),
        right={"linear": ((num_test, num_test), (num_test, 0))},
        min_size=10,
        worst={"linear": WorstGroup(classes=(name, "3"), accuracy=accuracy, num_test=num_test)},
        num_empty=0,
        num_small=0,
        num_unlabelled=0,
    )


def samples(accuracy: float, *, num_test: int, seed: int) -> NDArray[np.bool_]:
    """Return which samples are right, (num_test,): the easiest ones of one fixed order, with some noise of the seed."""
    ease_N = np.random.default_rng(7).random(num_test)
    noise_N = np.random.default_rng([11, seed]).normal(0, 0.1, num_test)
    count = round(accuracy * num_test)
    right_N = np.zeros(num_test, dtype=bool)
    right_N[np.argsort(ease_N + noise_N)[:count]] = True
    return right_N
