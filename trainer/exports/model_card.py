"""Describe an exported encoder for the Hugging Face Hub: the model card (README.md) and config.json.

The card holds no path of the machine that trained. Every number comes from the run directory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from trainer.models.encoder import EncoderConfig, ResNetConfig, TimmConfig
from trainer.modules import TrainedModules
from trainer.own_code import is_own
from trainer.pretrained import HEADER_KEY, ExportHeader
from trainer.probes.result import ProbeResult, read_result
from trainer.run_dir import RunDir

_CARD: Final = """---
library_name: {library}
pipeline_tag: {task}
tags:
{tags}
---

# {title}

An encoder. It turns {medium} into features; it has no classifier.

{training}## Use

```python
{code}
```
{timm}
## All settings of the encoder

```json
{settings}
```
"""
_CODE: Final = """{own}import torch
from trainer import load_encoder

encoder = load_encoder("PATH OF THIS DIRECTORY")
inputs = torch.rand(8, {channels}, {height}, {width})  # {inputs}
with torch.no_grad():
    pooled = encoder.pooled(inputs)"""
_PICTURES: Final = "pictures in [0, 1]; the encoder normalises"
_SOUNDS: Final = "clean_spectrogram(waveforms, mel_config({sample_rate})) of trainer.views.expert_audio"
_TIMM: Final = """
timm loads it too: `timm.create_model("local-dir:PATH OF THIS DIRECTORY", pretrained=True)`. That model takes inputs
that are normalised by mean {mean} and std {std}.
"""
_SIZE_OF_AN_EXAMPLE: Final = (32, 32)


def config_of_the_hub(header: ExportHeader, *, input_size: tuple[int, int] | None) -> dict[str, Any]:
    """Return the contents of config.json: the header of the export, and what timm reads if timm has the architecture.

    With the latter, `timm.create_model("local-dir:DIRECTORY")` or "hf-hub:OWNER/NAME" loads the weights.

    `input_size` is the height and width of the inputs in training. If it is None, the `img_size` of timm takes its
    place, if there is one.
    """
    config = header.encoder
    values: dict[str, Any] = {HEADER_KEY: header.model_dump(mode="json")}
    name, options = timm_architecture(config)
    if name is None:
        return values
    cfg: dict[str, Any] = {"mean": config.mean, "std": config.std, "num_classes": 0, "license": "unknown"}
    if input_size is None and isinstance(side := options.get("img_size"), int):
        input_size = side, side
    if input_size is not None:
        cfg["input_size"] = (config.in_channels, *input_size)
    return {
        "architecture": name,
        "num_classes": 0,
        "model_args": {"in_chans": config.in_channels, **options},
        "pretrained_cfg": cfg,
        **values,
    }


def timm_architecture(config: EncoderConfig | None) -> tuple[str | None, dict[str, Any]]:
    """Return the name and the options by which timm builds this network; no name if timm does not have it."""
    match config:
        case TimmConfig(name=name, options=options):
            return name, dict(options)
        case ResNetConfig(form="standard", stem_relu=True, kind=kind):
            return kind, {}
    return None, {}


@dataclass(frozen=True)
class ExportedRun:
    """A run at the step that is exported."""

    run_dir: RunDir
    modules: TrainedModules


def model_card(
    header: ExportHeader, *, title: str | None, run: ExportedRun | None, input_size: tuple[int, int] | None
) -> str:
    """Return the model card: of a run with its data, settings, steps, and the probes of this checkpoint.

    An encoder without a run is from somebody's own training loop, which may have read labels. `title` is by default the
    name in the header.
    """
    encoder = header.encoder
    name, _ = timm_architecture(encoder)
    facts: dict[str, object] = {"encoder": encoder.kind}
    probes, sample_rate, reads_labels = list[ProbeResult](), None, True
    if run is not None:
        config, trained_on = run.modules.config, run.modules.trained_on
        probes, sample_rate, reads_labels = _probes(run), config.data.sample_rate, config.objective.needs_labels
        facts |= {
            "objective": config.objective.kind,
            "labels in training": "read by the objective" if reads_labels else "none",
            "views": config.views.kind,
            "steps": f"{header.step:,} of {config.global_batch_size:,} samples each",
            "optimizer": config.optimizer.kind,
            "seed": config.seed,
            "train set": f"manifest {trained_on.train_manifest_sha256[:12]}" if trained_on else "not known",
            "commit of the code": header.git_commit or "not known",
        }
    training = _table(["", ""], facts.items())
    if probes:
        training += _table(
            ["label", "linear probe, %", "kNN, %", "majority, %", "chance, %", "test samples"], map(_row, probes)
        )
    tags = ["feature-extraction"] if reads_labels else ["self-supervised-learning", "feature-extraction"]
    height, width = input_size or _SIZE_OF_AN_EXAMPLE
    code = _CODE.format(
        own=f"import {type(encoder).__module__}  # the code of the encoder\n" if is_own(encoder) else "",
        channels=encoder.in_channels,
        height=height,
        width=width,
        inputs=_PICTURES if sample_rate is None else _SOUNDS.format(sample_rate=sample_rate),
    )
    return _CARD.format(
        library="timm" if name else "feature-dropout",
        task="image-feature-extraction" if sample_rate is None else "feature-extraction",
        tags="\n".join(f"- {tag}" for tag in tags),
        title=title or header.run,
        medium="pictures" if sample_rate is None else "spectrograms of sounds",
        training=training,
        code=code,
        timm=_TIMM.format(mean=encoder.mean, std=encoder.std) if name else "",
        settings=json.dumps(header.model_dump(mode="json"), indent=2),
    )


def _table(head: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines) + "\n\n"


def _row(result: ProbeResult) -> list[str]:
    shares = (result.linear.accuracy, result.knn.accuracy, result.majority_share, result.chance)
    return [result.title or result.label, *(f"{100 * share:.1f}" for share in shares), f"{result.num_test:,}"]


def _probes(run: ExportedRun) -> list[ProbeResult]:
    """Return the results with the settings of the run; those with other settings have a dash in their names.

    Leaves out results on another train set than the one of the training, which was replaced.
    """
    paths = sorted(run.run_dir.probes(run.modules.step).glob("*.json"))
    results = [read_result(path) for path in paths if "-" not in path.stem]
    if (trained_on := run.modules.trained_on) is None:
        return results
    of_training = {trained_on.train_manifest_sha256, *trained_on.train_sources.values()}
    return [result for result in results if result.train_manifest_sha256 in of_training]
