"""The published table of RandBit, beside the runs that repeat it.

Chen, Luo and Li, 2021, "Intriguing properties of contrastive losses": the printed outputs of the notebook
colabs/intriguing_properties of google-research/simclr, one run each. Invariant: every number here is published.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from trainer.reports.paired import Estimate, mean_of
from trainer.reports.suppression.changes import changes_of_cures
from trainer.reports.suppression.measured import Setting, StudyRun, number_of
from trainer.views.expert_image import ExpertImageConfig
from trainer.views.policy import BaseViewsConfig

SOURCE: Final = (
    "Chen, Luo and Li, 2021, Intriguing properties of contrastive losses, feature suppression by random bits; the "
    "printed outputs of the authors' notebook, one run each"
)
CHANCE: Final = 0.1
EMBEDDING_SIZE: Final = 64
BITS: Final = (0, 5, 10, 15, 20)
PUBLISHED: Final[Mapping[float, tuple[float, ...]]] = MappingProxyType(
    {
        0.05: (89.92, 70.63, 32.99, 14.26, 9.90),
        0.1: (89.16, 61.18, 18.67, 9.80, 10.33),
        0.2: (89.98, 32.99, 10.35, 10.03, 9.89),
    }
)
_NAME: Final = "randbit"
_LOSSES: Final = ("symmetric_info_nce", "nt_xent", "published_nt_xent")  # the first of these that was run counts
_VIEWS: Final = ExpertImageConfig(
    area=(0.5, 1.0), jitter_probability=0, grayscale_probability=0, blur_probability=0, flip_probability=0
)
_PAPER: Final = {"num_train": 60_000, "num_test": 10_000, "num_epochs": 10, "batch": 1_000}


@dataclass(frozen=True)
class Repeated:
    """Our runs of the published table.

    cure: by temperature, the cure whose runs stand beside the published row.
    found: by temperature and bits, our mean.
    differences: how our protocol differs, in words.
    """

    cure: Mapping[float, str]
    found: Mapping[tuple[float, int], Estimate]
    differences: tuple[str, ...]


def is_randbit(setting: Setting) -> bool:
    return setting.name.casefold().replace(" ", "").replace("-", "").startswith(_NAME)


def repeated(setting: Setting) -> Repeated | None:
    """Return the runs of a RandBit setting with a published loss and temperature; None if there are none.

    Of several cures with one temperature, the one that is most like the paper counts: by its loss, the size of its
    embedding and its views, then by the settings in which it differs from the plainest cure.
    """
    candidates: dict[float, list[tuple[tuple[int, ...], str]]] = {}
    plainest, changes = changes_of_cures([setting]) or ("", {})
    num_changed = {cure: len(one.everywhere) + len(one.elsewhere) for cure, one in changes.items()} | {plainest: 0}
    for (_, cure), runs in setting.cells.items():
        for run in runs.values():
            loss, encoder = run.config.objective, run.config.encoder
            temperature = getattr(loss, "temperature", None)
            if cure not in setting.cures or loss.kind not in _LOSSES:
                continue
            if run.config.views.is_learned or run.config.neighbours is not None:  # neither is in the paper
                continue
            if temperature in PUBLISHED and temperature is not None:
                unlike = (
                    _LOSSES.index(loss.kind),
                    abs(encoder.embedding_size - EMBEDDING_SIZE),
                    len(_other_views(run.config.views)),
                    num_changed.get(cure, 0),
                )
                candidates.setdefault(temperature, []).append((unlike, cure))
    cures = {temperature: min(of_temperature)[1] for temperature, of_temperature in sorted(candidates.items())}
    found: dict[tuple[float, int], Estimate] = {}
    used: list[StudyRun] = []
    for temperature, cure in cures.items():
        for difficulty in setting.difficulties:
            bits = number_of(difficulty)
            readings = setting.readings(difficulty, cure, setting.hard[0])
            if bits is not None and bits == int(bits) and readings:
                found[temperature, int(bits)] = mean_of(list(readings.values()))
                used += setting.runs(difficulty, cure).values()
    if not found:
        return None
    return Repeated(cures, found, _differences(setting, used))


def _differences(setting: Setting, runs: list[StudyRun]) -> tuple[str, ...]:
    label = setting.hard[0]
    results = [run.trained[label] for run in runs if label in run.trained]
    ours = {
        "num_train": {result.num_train for result in results},
        "num_test": {result.num_test for result in results},
        "num_epochs": {run.config.num_epochs for run in runs},
        "batch": {run.config.global_batch_size for run in runs},
    }
    units = {"num_train": "train pictures", "num_test": "test pictures", "num_epochs": "epochs", "batch": "in a batch"}
    told = [
        f"{' or '.join(f'{number:,}' for number in sorted(numbers))} {units[name]} instead of {_PAPER[name]:,}"
        for name, numbers in ours.items()
        if numbers != {_PAPER[name]}
    ]
    networks = sorted({run.config.encoder.kind for run in runs})
    if networks != ["convnet"]:
        told.append(f"the encoder {' and '.join(networks)} instead of three convolutions")
    sizes = sorted({run.config.encoder.embedding_size for run in runs})
    if sizes != [EMBEDDING_SIZE]:
        told.append(f"an embedding of {' or '.join(map(str, sizes))} instead of {EMBEDDING_SIZE}")
    views = sorted({_described(run.config.views) for run in runs if _other_views(run.config.views)})
    if views:
        told.append(f"the views {' and '.join(views)} instead of a crop of half of the picture or more")
    losses = sorted({run.config.objective.kind for run in runs})
    if losses != ["symmetric_info_nce"]:
        told.append(f"the loss {' and '.join(losses)} instead of the symmetric InfoNCE")
    told += [
        "an epoch shuffles the pictures, instead of the same batches each time",
        "crops have the law of torchvision instead of TensorFlow's, whose are a little smaller",
        "the bits are drawn from a hash of the pixels instead of the JPEG file",
        "a linear probe that is fitted to the frozen encoder after the training, instead of one trained along",
    ]
    return tuple(told)


def _other_views(views: BaseViewsConfig) -> dict[str, Any]:
    """Return the settings of views that are not those of the paper, by name; those that it alone has are None."""
    paper = _VIEWS.model_dump(mode="json")
    ours = dict.fromkeys(paper) | views.model_dump(mode="json")
    return {name: value for name, value in ours.items() if name not in paper or value != paper[name]}


def _described(views: BaseViewsConfig) -> str:
    """Return the kind of views, with the settings that are not those of the paper if that has the same kind."""
    if views.kind != _VIEWS.kind:
        return views.kind
    return f"{views.kind} with {', '.join(f'{name}={value}' for name, value in _other_views(views).items())}"
