"""Find or fit the linear classifier of a run, for analyses that ask which class the features of a sample show.

The heads are those that the probe saved with the checkpoint. If there are none, quick heads are fitted by the same
procedure, on cached features of a part of the train set. They are saved under the same name. Analyses use the encoder
in eval mode, so they never use heads that the probe fitted in train mode (batch_norm "train").

Shapes: N samples, B batch, F features of a sample.
"""

from __future__ import annotations

import sys

import torch

from data_pipeline.core.errors import UserError
from data_pipeline.core.progress import Progress
from trainer.analyses.loaded_run import LoadedRun, choose_rows
from trainer.probes.features import extract, frozen
from trainer.probes.heads import Heads, read_heads, write_heads
from trainer.probes.linear import PROBE_VIEW, Target, fit_linear_probe, num_labelled, stored_batches
from trainer.probes.targets import readable_labels
from trainer.probes.view_batches import view_batches

NUM_QUICK = 10_000  # train samples, one view of each
NUM_QUICK_EPOCHS = 20
QUICK_FIT = f"quick fit on one view of each of up to {NUM_QUICK} train samples, {NUM_QUICK_EPOCHS} epochs"


def heads_of(loaded: LoadedRun) -> Heads:
    """Return the heads of the checkpoint of a loaded run, on its device; if there are none, fit and save them.

    Raises `UserError` if the file is damaged, or if its heads do not fit this train set and encoder.
    """
    run, own = loaded.run_dir.path, loaded.modules.config.probe
    # With another probe in its config, heads.safetensors of a run does not fit. These options write the other name.
    needed = {"batch_norm": "eval", "reads": "features"}
    needed = {name: value for name, value in needed.items() if getattr(own, name) != value}
    name = "heads" + "".join(f"-{name}_{value}" for name, value in needed.items())
    command = " ".join([str(run), *(f"--{name.replace('_', '-')} {value}" for name, value in needed.items())])
    path = loaded.run_dir.probes(loaded.modules.step) / f"{name}.safetensors"
    if not path.is_file():
        if needed:
            has, wanted = (" and ".join(f"{name} {of[name]}" for name in needed) for of in (own.model_dump(), needed))
            print(
                f"the probe of {run} has {has}, but views are judged with {wanted}, so a quick classifier is fitted in "
                f"this way; `python -m trainer.probe {command}` fits a full one",
                file=sys.stderr,
            )
        write_heads(path, fit_quickly(loaded))
    heads = read_heads(path, device=loaded.device)
    num_features = loaded.modules.encoder.feature_size(*loaded.test.images_NCHW.shape[2:])
    expected = {
        space: (len(names), num_features)
        for space, names in readable_labels(loaded.train.manifest, loaded.test.manifest).items()
    }
    found = {space: tuple(head.weight_KF.shape) for space, head in heads.by_label.items()}
    if heads.train_manifest_sha256 != loaded.train.manifest.sha256 or not found.items() <= expected.items():
        raise UserError(f"{path} was fitted on another train set or encoder; run `python -m trainer.probe {command}`")
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
        for space, names in readable_labels(train.manifest, test.manifest).items()
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
