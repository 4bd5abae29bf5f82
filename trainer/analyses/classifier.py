"""Find or fit the linear classifier of a run, for analyses that ask which class the features of a sample show.

The heads are those that the probe saved with the checkpoint. For labels that it did not probe, quick heads are fitted
by the same procedure, on cached features of a part of the train set. They are saved in a file of their own, which a
probe leaves as it is. So the labels that are judged do not depend on the commands that ran before. Analyses use the
encoder in eval mode, so they never use heads that the probe fitted in train mode (batch_norm "train").

Shapes: N samples, B batch, F features of a sample.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from data_pipeline.core.errors import UserError
from data_pipeline.core.progress import Progress
from trainer.analyses.loaded_run import LoadedRun, choose_rows
from trainer.probes.features import LabelSpace, extract, frozen
from trainer.probes.heads import Heads, read_heads, write_heads
from trainer.probes.linear import PROBE_VIEW, Target, fit_linear_probe, num_labelled, stored_batches
from trainer.probes.targets import readable_labels
from trainer.probes.view_batches import view_batches

NUM_QUICK = 10_000  # train samples, one view of each
NUM_QUICK_EPOCHS = 20
QUICK_FIT = f"quick fit on one view of each of up to {NUM_QUICK} train samples, {NUM_QUICK_EPOCHS} epochs"


def heads_of(loaded: LoadedRun) -> Heads:
    """Return the heads of the checkpoint of a loaded run, on its device: of its probe, and quick ones for other labels.

    Fits and saves quick heads if they are needed and missing; `made_by` of the result says which labels have them.
    Raises `UserError` if a file is damaged, or if its heads do not fit this train set and encoder.
    """
    own = loaded.modules.config.probe
    # With another probe in its config, the fitting heads are in the file of a probe with these options.
    needed = {"batch_norm": "eval", "reads": "features", "precision": "float32"}
    suffix = "".join(f"-{name}_{value}" for name, value in needed.items() if getattr(own, name) != value)
    path = loaded.run_dir.probes(loaded.modules.step) / f"heads{suffix}.safetensors"
    quick_path = path.with_name(f"quick_{path.name}")
    probed = _read_checked(path, loaded) if path.is_file() else None
    if probed is not None and probed.by_label.keys() >= _readable(loaded).keys():
        return probed
    if not quick_path.is_file():
        write_heads(quick_path, fit_quickly(loaded))
    quick = _read_checked(quick_path, loaded)
    missing = [space for space in quick.by_label if probed is None or space not in probed.by_label]
    if probed is None or not missing:
        return probed or quick
    made_by = f"{probed.made_by}; for {', '.join(f'label_{space}' for space in missing)}: {quick.made_by}"
    return replace(probed, by_label={**quick.by_label, **probed.by_label}, made_by=made_by)


def _readable(loaded: LoadedRun) -> dict[LabelSpace, tuple[str, ...]]:
    """Return the class names of each label that heads can predict."""
    return readable_labels(loaded.train.manifest, loaded.test.manifest)


def _read_checked(path: Path, loaded: LoadedRun) -> Heads:
    """Read heads. Raises `UserError` if they do not fit the train set and the encoder of the run."""
    heads = read_heads(path, device=loaded.device)
    num_features = loaded.modules.encoder.feature_size(*loaded.test.images_NCHW.shape[2:])
    expected = {space: (len(names), num_features) for space, names in _readable(loaded).items()}
    found = {space: tuple(head.weight_KF.shape) for space, head in heads.by_label.items()}
    if heads.train_manifest_sha256 != loaded.train.manifest.sha256 or not found.items() <= expected.items():
        raise UserError(f"{path} was fitted on another train set or encoder; remove it")
    return heads


def fit_quickly(loaded: LoadedRun) -> Heads:
    """Fit heads for every label in eval mode, on views of the run's policy if its probe uses them."""
    encoder, policy = loaded.modules.encoder, loaded.modules.view_policy
    train, test, device = loaded.train, loaded.test, loaded.device
    config = loaded.modules.config.probe.model_copy(update={"num_epochs": NUM_QUICK_EPOCHS})
    rows_N, test_rows_N = (choose_rows(len(samples), NUM_QUICK, seed=config.seed) for samples in (train, test))
    parts = []
    with Progress("features for a quick classifier", total=len(rows_N)) as progress, frozen(encoder):
        for batch in view_batches(policy, train, rows_N, seed=config.seed, view=PROBE_VIEW, device=device):
            shown_BCHW = batch.views_BCHW if config.views == "policy" else batch.seen_BCHW
            parts.append(encoder.features(shown_BCHW))
            progress.advance(len(shown_BCHW))
        test_NF = extract(encoder.features, test.images(test_rows_N), device=device)
    features_NF = torch.cat(parts)
    targets = {
        space: Target(train.labels(space)[rows_N], test.labels(space)[test_rows_N], num_classes=len(names))
        for space, names in _readable(loaded).items()
    }
    targets = {
        space: target
        for space, target in targets.items()
        if num_labelled(target.train_N) and num_labelled(target.test_N)
    }

    batches = stored_batches(features_NF, targets, config=config)
    probes = fit_linear_probe(batches, test_features=lambda: test_NF, targets=targets, config=config)
    heads = {space: probe.head for space, probe in probes.items()}
    return Heads(heads, QUICK_FIT, train.manifest.sha256)
