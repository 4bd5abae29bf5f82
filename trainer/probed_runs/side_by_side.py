"""Probe the features of several runs side by side, as if one encoder had computed them (Zhang et al. 2024).

Runs that keep different features, such as one with `neighbours` and one without, may keep all of them together. The
probe says what both keep, beside what each keeps alone.

Shapes: B samples, F features of the linear probe, D features of kNN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from data_pipeline.core.errors import UserError
from data_pipeline.storage.store import SampleStore
from trainer.config import RunConfig, read_run_config
from trainer.data import Manifests, read_manifests
from trainer.models.encoder import Encoder
from trainer.own_code import warn_of_changed_code
from trainer.pretrained import load_modules
from trainer.probed_runs.probing import count_shared, warn_of_other_data
from trainer.probes.any_encoder import Accuracy, probe
from trainer.run_dir import RunDir

TOGETHER = "side by side"


class SideBySide(nn.Module):
    """Encoders of which each sample passes all.

    The linear probe reads the features of all encoders. kNN reads their pooled features, each of length 1, so that
    its cosine is the mean of the cosines of the encoders.
    """

    def __init__(self, encoders: Sequence[Encoder]) -> None:
        super().__init__()
        self._encoders = encoders
        self.encoders = nn.ModuleList(encoders)  # so that they are moved with this module

    def features(self, views_BCHW: Tensor) -> Tensor:
        """Return the features of all encoders, (B, sum of F)."""
        return self.features_and_pooled(views_BCHW)[0]

    def pooled(self, views_BCHW: Tensor) -> Tensor:
        """Return the pooled features of all encoders, (B, sum of D)."""
        return self.features_and_pooled(views_BCHW)[1]

    def features_and_pooled(self, views_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        """Return the results of `features` and of `pooled`, by one pass of each encoder."""
        both = [encoder.features_and_pooled(views_BCHW) for encoder in self._encoders]
        features, pooled = ([each[number] for each in both] for number in (0, 1))
        return torch.cat(features, dim=1), torch.cat([F.normalize(each, dim=1) for each in pooled], dim=1)


def probe_side_by_side(
    run_dirs: Sequence[RunDir],
    *,
    labels: Sequence[str] | None = None,
    num_epochs: int | None = None,
    device: torch.device,
    allow_shared: float | None = None,
) -> dict[str, dict[str, Accuracy]]:
    """Return the accuracies of each run, by its path, and of all side by side, by "side by side"; each by label.

    The encoders are those of the newest checkpoints. The probe is that of the first run, without views.

    labels, num_epochs, allow_shared: replace those of the first run's probe.

    Prints a warning if a run was trained on other data or with other code. Raises `UserError` for fewer than two runs,
    if a run is given twice, if the runs do not have the same train and test sets, or if these share too many samples.
    """
    if len(run_dirs) < 2:
        raise UserError(f"--side-by-side joins the features of two runs or more, and {len(run_dirs)} is given")
    _refuse_same(run_dirs)
    configs = [read_run_config(run_dir) for run_dir in run_dirs]
    warn_of_changed_code(run_dirs)
    data, manifests = configs[0].data, _read_same_manifests(run_dirs, configs)
    count_shared(configs[0], manifests, allowed=allow_shared)
    changes: dict[str, object] = {"views": "none", "batch_norm": "eval", "precision": "float32"}
    changes["allow_shared"] = 1.0  # they are counted above
    changes |= {} if num_epochs is None else {"num_epochs": num_epochs}
    config = configs[0].probe.model_copy(update=changes)
    train = SampleStore(data.probed_dir, remote=data.remote, manifest=manifests.probed)
    test = SampleStore(data.test_dir, remote=data.remote, manifest=manifests.test)
    by_name: dict[str, Encoder | SideBySide] = {}
    for run_dir in run_dirs:
        modules = load_modules(run_dir)
        warn_of_other_data(modules, train=manifests.probed, test=manifests.test)
        by_name[str(run_dir.path)] = modules.encoder.to(device)
    by_name[TOGETHER] = SideBySide([encoder for encoder in by_name.values() if isinstance(encoder, Encoder)])
    return {name: probe(encoder, train, test, labels=labels, config=config) for name, encoder in by_name.items()}


def _refuse_same(run_dirs: Sequence[RunDir]) -> None:
    """Raise `UserError` if a run is given twice, also by another path."""
    first: dict[Path, RunDir] = {}
    for run_dir in run_dirs:
        if (path := run_dir.path.resolve()) in first:
            raise UserError(
                f"--side-by-side joins different runs, but {run_dir.path} is the same run as {first[path].path}; name "
                "each run once"
            )
        first[path] = run_dir


def _read_same_manifests(run_dirs: Sequence[RunDir], configs: Sequence[RunConfig]) -> Manifests:
    """Return the manifests of all runs. Raises `UserError` if two runs have different ones."""
    manifests = [read_manifests(config.data, makes_index=False) for config in configs]
    hashes = [(found.probed.sha256, found.test.sha256) for found in manifests]
    for run_dir, of_run in zip(run_dirs, hashes, strict=True):
        if of_run != hashes[0]:
            raise UserError(
                f"{run_dirs[0].path} and {run_dir.path} do not have the same train and test sets, so their features "
                "are not those of the same samples; pass runs on the same data"
            )
    return manifests[0]


def side_by_side_table(found: Mapping[str, Mapping[str, Accuracy]]) -> str:
    """Return a table in per cent: a row for each label, a column for each run and one for all of them."""
    names = list(found)
    columns = [*(f"run {number}" for number in range(1, len(names))), TOGETHER, "chance"]
    lines = [f"run {number}: {name}" for number, name in enumerate(names[:-1], 1)]
    for method in ("linear", "knn"):
        lines.append(f"{'linear probe, %' if method == 'linear' else 'kNN, %':18}" + _cells(columns))
        for label, together in found[TOGETHER].items():
            accuracies = [getattr(found[name][label], method) for name in names]
            numbers = [f"{100 * accuracy:.1f}" for accuracy in (*accuracies, together.chance)]
            lines.append(f"{'label_' + label:18}" + _cells(numbers))
    return "\n".join(lines)


def _cells(texts: Sequence[str]) -> str:
    return "".join(f"{text:>14}" for text in texts)
