"""Describe an exported encoder for the Hugging Face Hub: the model card (README.md) and config.json.

The card holds no path of the machine that trained. Every number comes from the run directory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.models.encoder import EncoderConfig, ResNetConfig, TimmConfig
from trainer.modules import TrainedModules
from trainer.objectives import BaseObjectiveConfig
from trainer.open_settings import recorded_input_size
from trainer.own_code import is_own
from trainer.pretrained import HEADER_KEY, ExportHeader
from trainer.probes.result import ProbeResult, read_result
from trainer.provenance import RECORDED_NUM_SAMPLES
from trainer.run_dir import RunDir

_FRONT = """---
library_name: {library}
pipeline_tag: {task}
tags:
{tags}
---
"""
_SELF_SUPERVISED = "self-supervised-learning"
_TAGS = ("feature-extraction",)
_NO_LABELS = "none"
_SIZE_OF_AN_EXAMPLE = (32, 32)


@dataclass(frozen=True)
class _Inputs:
    """The inputs of an encoder.

    size: the height and width of the pictures in training; None if they are not known.
    sample_rate: the points a second of sounds; None for pictures.
    """

    size: tuple[int, int] | None = None
    sample_rate: int | None = None


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


def model_card(header: ExportHeader) -> str:
    """Return the model card of an encoder from someone's own training loop, which may have read labels."""
    facts = [("encoder", _encoder(header)), ("steps", f"{header.step:,}" if header.step else None)]
    sections = _sections(header, title=header.run, tags=_TAGS, facts=facts, probes=[], inputs=_Inputs())
    return "\n\n".join(sections) + "\n"


def model_card_of_run(
    run_dir: RunDir, modules: TrainedModules, header: ExportHeader, *, title: str | None = None
) -> str:
    """Return the model card of a run's encoder: data, settings, steps, versions, and the probes of this checkpoint."""
    config, provenance = modules.config, run_dir.read_provenance()
    versions = provenance.get("versions") or {}
    probes = _probes(run_dir, modules)
    train_set = None if modules.trained_on is None else modules.trained_on.train_manifest_sha256
    num_samples = provenance.get(RECORDED_NUM_SAMPLES) if provenance.get("train_manifest_sha256") == train_set else None
    facts: list[tuple[str, object]] = [
        ("encoder", _encoder(header)),
        ("objective", config.objective.kind),
        ("labels in training", _labels_of(config.objective)),
        ("views", config.views.kind),
        ("steps", f"{header.step:,} of {config.global_batch_size:,} samples each"),
        ("optimizer", config.optimizer.kind),
        ("precision", config.precision),
        ("seed", config.seed),
        ("train set", _manifest(train_set)),
        ("samples in it", f"{num_samples:,}" if isinstance(num_samples, int) else None),
        ("commit of the code", header.git_commit),
        ("software", ", ".join(f"{name} {versions[name]}" for name in ("python", "torch") if name in versions)),
        ("trained on", provenance.get("gpu") or provenance.get("cpu")),
    ]
    tags = (_SELF_SUPERVISED, *_TAGS) if _labels_of(config.objective) == _NO_LABELS else _TAGS
    inputs = _Inputs(size=recorded_input_size(provenance), sample_rate=config.data.sample_rate)
    sections = _sections(header, title=title or config.name, tags=tags, facts=facts, probes=probes, inputs=inputs)
    return "\n\n".join(sections) + "\n"


def _sections(
    header: ExportHeader,
    *,
    title: str,
    tags: Sequence[str],
    facts: Iterable[tuple[str, object]],
    probes: Sequence[ProbeResult],
    inputs: _Inputs,
) -> Iterable[str]:
    name, _ = timm_architecture(header.encoder)
    library = "timm" if name else "feature-dropout"
    is_sound = inputs.sample_rate is not None
    task = "feature-extraction" if is_sound else "image-feature-extraction"
    yield _FRONT.format(library=library, task=task, tags="\n".join(f"- {tag}" for tag in tags)) + f"\n# {title}"
    what = "spectrograms of sounds" if is_sound else "pictures"
    yield f"An encoder. It turns {what} into features; it has no classifier."
    table = [f"| {what} | {value} |" for what, value in facts if value not in (None, "")]
    if table:
        yield "## Training\n\n" + "\n".join(["| | |", "|---|---|", *table])
    if probes:
        yield "## Probes\n\n" + _probe_table(probes)
    yield f"## Use\n\n```python\n{_code(header, inputs)}\n```"
    if name:
        yield (
            'timm loads it too: `timm.create_model("local-dir:PATH OF THIS DIRECTORY", pretrained=True)`. That model '
            f"takes inputs that are normalised by mean {_numbers(header.encoder.mean)} and std "
            f"{_numbers(header.encoder.std)}."
        )
    settings = json.dumps(header.model_dump(mode="json"), indent=2)
    yield f"## All settings of the encoder\n\n```json\n{settings}\n```"


def _code(header: ExportHeader, inputs: _Inputs) -> str:
    """Return the lines that load the encoder and read the features of eight random inputs.

    The kind of an encoder of other code is known only if its module was imported.
    """
    module = type(header.encoder).__module__
    own = (
        f"import {module}  # the code of the encoder, which is not in this directory\n"
        if is_own(header.encoder)
        else ""
    )
    if inputs.sample_rate is not None:
        return (
            f"{own}import torch\nfrom data_pipeline.audio.log_mel import mel_config\n"
            "from trainer.models import load_encoder\n"
            "from trainer.views.expert_audio import clean_spectrogram\n\n"
            f'encoder = load_encoder("PATH OF THIS DIRECTORY")\nmel = mel_config({inputs.sample_rate})\n'
            "waveforms = 2 * torch.rand(8, mel.num_points) - 1  # in [-1, 1]\nwith torch.no_grad():\n"
            "    pooled = encoder.pooled(clean_spectrogram(waveforms, mel))"
        )
    height, width = inputs.size or _SIZE_OF_AN_EXAMPLE
    which = "of the size of the training" if inputs.size else "of the size that it was trained on"
    return (
        f"{own}import torch\nfrom trainer.models import load_encoder\n\n"
        f'encoder = load_encoder("PATH OF THIS DIRECTORY")\n'
        f"pictures = torch.rand(8, {header.encoder.in_channels}, {height}, {width})  # in [0, 1], {which}\n"
        "with torch.no_grad():\n    pooled = encoder.pooled(pictures)  # the encoder normalises"
    )


def _probe_table(probes: Sequence[ProbeResult]) -> str:
    lines = [
        "| label | linear probe, % | kNN, % | majority, % | chance, % | test samples |",
        "|---|---|---|---|---|---|",
    ]
    for result in probes:
        numbers = (result.linear.accuracy, result.knn.accuracy, result.majority_share, result.chance)
        percents = " | ".join(f"{100 * number:.1f}" for number in numbers)
        lines.append(f"| {result.title or result.label} | {percents} | {result.num_test:,} |")
    return "\n".join(lines)


def _probes(run_dir: RunDir, modules: TrainedModules) -> list[ProbeResult]:
    """Return the results with the settings of the run; those with other settings have a dash in their names.

    Leaves out results on another train set than the one of the training, which was replaced.
    """
    paths = sorted(run_dir.probes(modules.step).glob("*.json"))
    results = [read_result(path) for path in paths if "-" not in path.stem]
    if (trained_on := modules.trained_on) is None:
        return results
    of_training = {trained_on.train_manifest_sha256, *trained_on.train_sources.values()}
    return [result for result in results if result.train_manifest_sha256 in of_training]


def _encoder(header: ExportHeader) -> str:
    config = header.encoder
    return config.name + " (timm)" if isinstance(config, TimmConfig) else config.kind


def _labels_of(objective: BaseObjectiveConfig) -> str:
    return "read by the objective" if objective.needs_labels else _NO_LABELS


def _manifest(sha256: str | None) -> str | None:
    return None if sha256 is None else f"manifest {sha256[:12]}"


def _numbers(values: Sequence[float] | None) -> str:
    return ", ".join(f"{value:.4g}" for value in values or ())
