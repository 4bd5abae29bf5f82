"""Describe an exported encoder for the Hugging Face Hub: the model card (README.md) and config.json.

The words of the card are in model_card.md. It holds no path of the machine that trained. Every number comes from the
run directory.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final

from jinja2 import StrictUndefined, Template

from data_pipeline.core.kinds import is_own
from trainer.models.encoder import EncoderConfig, ResNetConfig, TimmConfig
from trainer.modules import TrainedModules
from trainer.pretrained import HEADER_KEY, ExportHeader
from trainer.probes.result import ProbeResult, read_result
from trainer.run_dir import RunDir

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
    encoder, config = header.encoder, None if run is None else run.modules.config
    name, _ = timm_architecture(encoder)
    text = files("trainer.exports").joinpath("model_card.md").read_text(encoding="utf-8")
    template = Template(text, trim_blocks=True, undefined=StrictUndefined, keep_trailing_newline=True)
    card: str = template.render(
        title=title or header.run,
        step=header.step,
        git_commit=header.git_commit,
        encoder=encoder,
        is_in_timm=name is not None,
        own_module=type(encoder).__module__ if is_own(encoder) else None,
        input_size=input_size or _SIZE_OF_AN_EXAMPLE,
        config=config,
        sample_rate=None if config is None else config.data.sample_rate,
        trained_on=None if run is None else run.modules.trained_on,
        probes=[] if run is None else _probes(run),
        settings=header.model_dump_json(indent=2),
    )
    return card


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
