"""Describe an exported encoder for the Hugging Face Hub: the model card (README.md) and config.json.

The card holds no path of the machine that trained. Every number comes from the run directory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from trainer.models.encoder import ResNetConfig, TimmConfig
from trainer.modules import TrainedModules
from trainer.pretrained import HEADER_KEY, ExportHeader
from trainer.probes.result import ProbeResult, read_result
from trainer.run_dir import RunDir

_FRONT = """---
library_name: {library}
pipeline_tag: image-feature-extraction
tags:
{tags}
---
"""
_SELF_SUPERVISED = "self-supervised-learning"
_TAGS = ("feature-extraction",)


def config_of_the_hub(header: ExportHeader) -> dict[str, Any]:
    """Return the contents of config.json: the header of the export, and what timm reads if timm has the architecture.

    With the latter, `timm.create_model("local-dir:DIRECTORY")` or "hf-hub:OWNER/NAME" loads the weights.
    """
    config = header.encoder
    values: dict[str, Any] = {HEADER_KEY: header.model_dump(mode="json")}
    name, options = timm_architecture(header)
    if name is None:
        return values
    cfg = {"mean": config.mean, "std": config.std, "num_classes": 0, "license": "unknown"}
    return {
        "architecture": name,
        "num_classes": 0,
        "model_args": {"in_chans": config.in_channels, **options},
        "pretrained_cfg": cfg,
        **values,
    }


def timm_architecture(header: ExportHeader) -> tuple[str | None, dict[str, Any]]:
    """Return the name and the options by which timm builds this network; no name if timm does not have it."""
    match header.encoder:
        case TimmConfig(name=name, options=options):
            return name, dict(options)
        case ResNetConfig(form="standard", stem_relu=True, kind=kind):
            return kind, {}
    return None, {}


def model_card(header: ExportHeader) -> str:
    """Return the model card of an encoder from someone's own training loop, which may have read labels."""
    facts = [("encoder", _encoder(header)), ("steps", f"{header.step:,}" if header.step else None)]
    return "\n\n".join(_sections(header, title=header.run, tags=_TAGS, facts=facts, probes=[])) + "\n"


def model_card_of_run(
    run_dir: RunDir, modules: TrainedModules, header: ExportHeader, *, title: str | None = None
) -> str:
    """Return the model card of a run's encoder: data, settings, steps, versions, and the probes of this checkpoint."""
    config, provenance = modules.config, run_dir.read_provenance()
    versions = provenance.get("versions") or {}
    probes = _probes(run_dir, modules.step)
    facts: list[tuple[str, object]] = [
        ("encoder", _encoder(header)),
        ("objective", config.objective.kind),
        ("labels in training", "read by the objective" if config.objective.needs_labels else "none"),
        ("views", config.views.kind),
        ("steps", f"{header.step:,} of {config.global_batch_size:,} samples each"),
        ("optimizer", config.optimizer.kind),
        ("precision", config.precision),
        ("seed", config.seed),
        ("train set", _manifest(None if modules.trained_on is None else modules.trained_on.train_manifest_sha256)),
        ("samples in it", f"{probes[0].num_train:,}" if probes else None),
        ("commit of the code", header.git_commit),
        ("software", ", ".join(f"{name} {versions[name]}" for name in ("python", "torch") if name in versions)),
        ("trained on", provenance.get("gpu") or provenance.get("cpu")),
    ]
    tags = _TAGS if config.objective.needs_labels else (_SELF_SUPERVISED, *_TAGS)
    return "\n\n".join(_sections(header, title=title or config.name, tags=tags, facts=facts, probes=probes)) + "\n"


def _sections(
    header: ExportHeader,
    *,
    title: str,
    tags: Sequence[str],
    facts: Iterable[tuple[str, object]],
    probes: Sequence[ProbeResult],
) -> Iterable[str]:
    name, _ = timm_architecture(header)
    library = "timm" if name else "feature-dropout"
    yield _FRONT.format(library=library, tags="\n".join(f"- {tag}" for tag in tags)) + f"\n# {title}"
    yield "An encoder. It turns pictures into features; it has no classifier."
    table = [f"| {what} | {value} |" for what, value in facts if value]
    if table:
        yield "## Training\n\n" + "\n".join(["| | |", "|---|---|", *table])
    if probes:
        yield "## Probes\n\n" + _probe_table(probes)
    channels = header.encoder.in_channels
    yield (
        "## Use\n\n```python\nimport torch\nfrom trainer.models import load_encoder\n\n"
        'encoder = load_encoder("PATH OF THIS DIRECTORY")\nwith torch.no_grad():\n'
        f"    pooled = encoder.pooled(torch.rand(8, {channels}, 32, 32))  # in [0, 1]; the encoder normalises\n```"
    )
    if name:
        yield (
            'timm loads it too: `timm.create_model("local-dir:PATH OF THIS DIRECTORY", pretrained=True)`. That model '
            f"takes inputs that are normalised by mean {_numbers(header.encoder.mean)} and std "
            f"{_numbers(header.encoder.std)}."
        )
    settings = json.dumps(header.model_dump(mode="json"), indent=2)
    yield f"## All settings of the encoder\n\n```json\n{settings}\n```"


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


def _probes(run_dir: RunDir, step: int) -> list[ProbeResult]:
    """Return the results with the settings of the run; those with other settings have a dash in their names."""
    return [read_result(path) for path in sorted(run_dir.probes(step).glob("*.json")) if "-" not in path.stem]


def _encoder(header: ExportHeader) -> str:
    config = header.encoder
    return config.name + " (timm)" if isinstance(config, TimmConfig) else config.kind


def _manifest(sha256: str | None) -> str | None:
    return None if sha256 is None else f"manifest {sha256[:12]}"


def _numbers(values: Sequence[float] | None) -> str:
    return ", ".join(f"{value:.4g}" for value in values or ())
