"""Find the linear classifier of a run, for analyses that ask which class the features of a sample show.

The heads are those that the probe saved with the checkpoint. Analyses use the encoder in eval mode and float32, so they
never use heads that the probe fitted in train mode, in bfloat16 or on something else than the features.
"""

from __future__ import annotations

from data_pipeline.core.errors import UserError
from trainer.analyses.loaded_run import LoadedRun
from trainer.probes.heads import Heads, read_heads
from trainer.probes.targets import readable_labels

_NEEDED = {"batch_norm": "eval", "reads": "features", "precision": "float32"}


def heads_of(loaded: LoadedRun) -> Heads:
    """Return the heads of the checkpoint of a loaded run, on its device.

    Raises `UserError` if the run was not probed at this step, if the file is damaged, or if its heads do not fit this
    train set and encoder.
    """
    # With another probe in its config, the fitting heads are in the file of a probe with these options.
    own = loaded.config.probe
    changes = {name: value for name, value in _NEEDED.items() if getattr(own, name) != value}
    suffix = "".join(f"-{name}_{value}" for name, value in changes.items())
    path = loaded.run_dir.probes(loaded.modules.step) / f"heads{suffix}.safetensors"
    if not path.is_file():
        options = "".join(f" --{name.replace('_', '-')} {value}" for name, value in changes.items())
        raise UserError(
            f"{path} does not exist; fit the heads with `python -m trainer.probe {loaded.run_dir.path} --step "
            f"{loaded.modules.step}{options}`"
        )
    heads = read_heads(path, device=loaded.device)
    num_features = loaded.modules.encoder.feature_size(*loaded.test.images_NCHW.shape[2:])
    labels = readable_labels(loaded.train.manifest, loaded.test.manifest)
    expected = {space: (len(names), num_features) for space, names in labels.items()}
    found = {space: tuple(head.weight_KF.shape) for space, head in heads.by_label.items()}
    if heads.train_manifest_sha256 != loaded.train.manifest.sha256 or not found.items() <= expected.items():
        raise UserError(f"{path} was fitted on another train set or encoder; remove it")
    return heads
