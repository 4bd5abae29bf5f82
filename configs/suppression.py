"""The suppression benchmark: every setting x every cure x several difficulties, as studies.

docs/cures.md has the commands. `suppression` is for a cluster and trains a ResNet-18 for 100 epochs.
`suppression_small` trains the small network of the RandBit experiment for 160 steps. `suppression_quick` is RandBit
with three cures.

No function here is a recipe. A cure is a function of a run: it changes the loss, the views or the encoder, and knows no
label. All cures of a setting have the same data, seeds, optimizer and number of steps, so their differences are paired.
`ceiling` runs are trained with a label, alone or beside SimCLR (`joint`). Online probes say which label SimCLR learns
first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from configs.base import named
from data_pipeline.building.suppression_settings import SETTINGS, SMALL_SAMPLE_RATE, Scale, Setting, directory_of
from data_pipeline.overlays.boolean import BooleanOptions
from trainer.adversary import AdversaryConfig
from trainer.config import RunConfig
from trainer.data import DataConfig
from trainer.models.encoder import ConvNetConfig, EncoderConfig, ResNetConfig
from trainer.models.heads import HeadConfig
from trainer.models.late_pruning import LatePruningConfig
from trainer.objectives import (
    BYOLConfig,
    DCLConfig,
    IFMConfig,
    InstanceDiscriminationConfig,
    JointContrastiveConfig,
    MACLConfig,
    NTXentCycleConfig,
    NTXentDecoderConfig,
    SieveConfig,
    SIGRegConfig,
    SupervisedConfig,
    SymmetricInfoNCEConfig,
    VICRegConfig,
)
from trainer.optim.optimizers import AdamConfig, ScheduleConfig
from trainer.probes.benchmark import benchmark_probe
from trainer.views.adversarial_mask import AdversarialMaskConfig
from trainer.views.channel_dropout import ChannelDropoutConfig
from trainer.views.composed import ByEpochConfig, PairConfig, SequenceConfig
from trainer.views.expert_audio import SpectralConfig
from trainer.views.expert_image import ExpertImageConfig
from trainer.views.policy import BaseViewsConfig
from trainer.views.viewmaker import ViewmakerConfig

TEMPERATURE: Final = 0.1  # of every loss that has one, unless it is the cure
_SEEDS: Final = (0, 1, 2)
_RANDBIT_CROP: Final = ExpertImageConfig(  # Chen, Luo and Li 2021: a crop of half of the picture or more, nothing else
    area=(0.5, 1.0), jitter_probability=0, grayscale_probability=0, blur_probability=0, flip_probability=0
)
_NOT_AT_A_PLACE: Final = ("randbit", "trifeature", "colours", "boolean", "boolean_correlated")  # nothing to mask
# With colour jitter, an encoder could not learn the colour; digits have no mirror images.
_CROP: Final = _RANDBIT_CROP.model_copy(update={"area": (0.2, 1.0)})
_EXPERT_VIEWS: Final[Mapping[str, BaseViewsConfig]] = {
    "randbit": _RANDBIT_CROP,
    "multidigits": _CROP,
    "colours": _CROP,
    "trifeature": _CROP.model_copy(update={"flip_probability": 0.5}),
    "modalities": _CROP,
    "boolean": _RANDBIT_CROP,
    "boolean_correlated": _RANDBIT_CROP,
    "speech": SpectralConfig(),
}


@dataclass(frozen=True)
class Point:
    """One setting in one difficulty at one scale, without a cure.

    Attributes:
        name: the key of the setting in `SETTINGS`.
        difficulty: the name of the difficulty.
        scale: "small" is for a CPU.
    """

    name: str
    difficulty: str
    scale: Scale

    @property
    def setting(self) -> Setting:
        return SETTINGS[self.name]

    @property
    def expert_views(self) -> BaseViewsConfig:
        return _EXPERT_VIEWS.get(self.name, ExpertImageConfig())

    @property
    def num_channels(self) -> int:
        """Return the channels of the encoder's input."""
        if self.name == "randbit":
            return 1 + int(self.difficulty)
        if self.name == "modalities":
            return 3 + int(self.difficulty)
        if self.setting.overlay == "boolean":
            return 2 * BooleanOptions().size
        return 1 if self.setting.is_sound else 3

    def viewmaker(self, **settings: Any) -> ViewmakerConfig:
        """Return the published viewmaker; at the small scale, an eighth as wide, with one block."""
        if self.scale == "small":
            settings |= {"base_width": 4, "num_res_blocks": 1}
        if self.setting.is_sound:
            settings |= {"clamp": False, "budget": settings.get("budget", 0.125)}
        return ViewmakerConfig(**settings)


def base_run(point: Point) -> RunConfig:
    """Return SimCLR with the expert views of a setting, which every cure changes."""
    is_small, setting = point.scale == "small", point.setting
    out = "data/suppression_small" if is_small else "data/suppression"
    train_dir, test_dir = (directory_of(out, point.name, point.difficulty, split) for split in ("train", "test"))
    sample_rate = SMALL_SAMPLE_RATE if is_small else 48_000
    return RunConfig(
        name=f"{point.name}-{point.difficulty}",
        data=DataConfig(
            train_dir=train_dir,
            test_dir=test_dir,
            num_workers=0 if is_small else 2,
            overlay="baked" if setting.overlay is None else "online_per_view" if setting.draws_views else "online",
            sample_rate=sample_rate if setting.is_sound else None,
        ),
        views=point.expert_views,
        encoder=_encoder(point),
        objective=SymmetricInfoNCEConfig(temperature=TEMPERATURE),
        optimizer=AdamConfig(
            learning_rate=1e-3,
            weight_decay=2e-4,
            decay="matrices",
            epsilon=1e-7,
            schedule=ScheduleConfig(kind="linear"),
        ),
        global_batch_size=(125 if setting.is_sound else 250) if is_small else 512,
        num_epochs=(20 if setting.is_sound else 10) if is_small else 100,
        probe=benchmark_probe(setting, point.scale),
    )


def _encoder(point: Point) -> EncoderConfig:
    """Return a ResNet-18; at the small scale and for RandBit, the network of Chen, Luo and Li (2021)."""
    form: dict[str, Any] = {"in_channels": point.num_channels}
    # Inputs with channels of bits or digits and sounds stay as they are; as published, if they are.
    if point.name == "randbit" or point.setting.is_sound or point.setting.draws_views:
        form |= {"mean": (0.0,) * point.num_channels, "std": (1.0,) * point.num_channels}
    if point.name == "randbit" or point.scale == "small":
        head = HeadConfig(hidden_sizes=(256,), batch_norm=True, bias=False, defaults="keras")
        return ConvNetConfig(head=head, embedding_size=64, **form)
    kind = "resnet18" if point.name == "trifeature" else "resnet18_small"
    return ResNetConfig(kind=kind, head=HeadConfig(hidden_sizes=(512,)), embedding_size=128, **form)


def _with_online_probes(point: Point, run: RunConfig) -> Mapping[str, Any]:
    """Return the settings of SimCLR itself: they only change its log. An easy label may rise within ten steps."""
    every, num_train, num_test = (8, 1_000, 500) if point.scale == "small" else (20, 4_000, 1_000)
    online = {"online_every_steps": every, "online_num_train": num_train, "online_num_test": num_test}
    return {"probe": run.probe.model_copy(update=online)}


Cure = Callable[[Point, RunConfig], Mapping[str, Any] | None]  # the settings that it changes; None if it has no meaning


def _objective(objective: Any) -> Cure:
    return lambda point, run: {"objective": objective}


def _cycle(point: Point, run: RunConfig) -> Mapping[str, Any]:
    half = run.num_epochs // 2
    # Two cycles, or one if the middle of each, which has the lowest temperature, would lie between two epochs.
    return {"objective": NTXentCycleConfig(period_epochs=run.num_epochs if half % 2 else half)}


def _large_embedding(point: Point, run: RunConfig) -> Mapping[str, Any]:
    return {"encoder": run.encoder.model_copy(update={"embedding_size": 512})}


def _late_pruning(point: Point, run: RunConfig) -> Mapping[str, Any]:
    return {"encoder": run.encoder.model_copy(update={"late_pruning": LatePruningConfig(blocks=2)})}


def _feature_sieve(point: Point, run: RunConfig) -> Mapping[str, Any]:
    encoder = run.encoder.model_copy(update={"early_head": 1})
    return {"encoder": encoder, "objective": SieveConfig(temperature=TEMPERATURE, forgetting_weight=10.0)}


def _vicreg(point: Point, run: RunConfig) -> Mapping[str, Any]:
    return {"objective": VICRegConfig(), **_large_embedding(point, run)}


def _learned(views: BaseViewsConfig) -> Mapping[str, Any]:
    return {"views": views, "adversary": AdversaryConfig(optimizer=AdamConfig(learning_rate=1e-3))}


def _viewmaker(**settings: Any) -> Cure:
    return lambda point, run: _learned(point.viewmaker(**settings))


def _masked_viewmaker(point: Point, run: RunConfig) -> Mapping[str, Any] | None:
    if point.setting.is_sound or point.name in _NOT_AT_A_PLACE:
        return None
    return _learned(point.viewmaker(mask="box"))


def _crop_then_viewmaker(point: Point, run: RunConfig) -> Mapping[str, Any] | None:
    if point.setting.is_sound:
        return None  # sounds have no crop
    no_colour = {"jitter_probability": 0.0, "grayscale_probability": 0.0, "blur_probability": 0.0}
    return _learned(SequenceConfig(parts=(point.expert_views.model_copy(update=no_colour), point.viewmaker())))


def _channel_dropout(point: Point, run: RunConfig) -> Mapping[str, Any] | None:
    if point.num_channels == 1:
        return None  # there is none to lose
    return {"views": SequenceConfig(parts=(point.expert_views, ChannelDropoutConfig()))}


def _adversarial_masks(point: Point, run: RunConfig) -> Mapping[str, Any] | None:
    if point.setting.is_sound:
        return None  # masks are for pictures
    masked = SequenceConfig(parts=(point.expert_views, AdversarialMaskConfig()))
    return _learned(PairConfig(first=point.expert_views, second=masked))


def _expert_against_viewmaker(point: Point, run: RunConfig) -> Mapping[str, Any]:
    return _learned(PairConfig(first=point.expert_views, second=point.viewmaker()))


def _viewmaker_and_expert_by_epoch(point: Point, run: RunConfig) -> Mapping[str, Any]:
    return _learned(ByEpochConfig(policies=(point.viewmaker(), point.expert_views)))


CURES: Final[Mapping[str, Cure]] = {
    "SimCLR": _with_online_probes,
    "temperature 0.05": _objective(SymmetricInfoNCEConfig(temperature=0.05)),
    "temperature 0.2": _objective(SymmetricInfoNCEConfig(temperature=0.2)),
    "temperature in cycles": _cycle,
    "MACL": _objective(MACLConfig(temperature=TEMPERATURE)),
    "DCL": _objective(DCLConfig(temperature=TEMPERATURE)),
    "IFM": _objective(IFMConfig(temperature=TEMPERATURE, epsilon=0.1)),
    "VICReg": _vicreg,
    "SIGReg": _objective(SIGRegConfig()),
    "BYOL": _objective(BYOLConfig(predictor=HeadConfig(hidden_sizes=(256,), batch_norm=True), momentum=0.99)),
    "memory bank": _objective(InstanceDiscriminationConfig(temperature=0.02)),
    "decoder": _objective(NTXentDecoderConfig(temperature=TEMPERATURE, decoder_weight=10.0)),
    "embedding of 512": _large_embedding,
    "late pruning": _late_pruning,
    "feature sieve": _feature_sieve,
    "viewmaker": _viewmaker(),
    "viewmaker, rate 0.25": _viewmaker(budget=0.4, dropout_rate=0.25),
    "masked viewmaker": _masked_viewmaker,
    "crop, then viewmaker": _crop_then_viewmaker,
    "channel dropout": _channel_dropout,
    "adversarial masks": _adversarial_masks,
    "expert against viewmaker": _expert_against_viewmaker,
    "viewmaker and expert, by epoch": _viewmaker_and_expert_by_epoch,
}


def benchmark(
    *,
    scale: Scale,
    settings: Sequence[str] = tuple(SETTINGS),
    cures: Sequence[str] = tuple(CURES),
    seeds: Sequence[int] = _SEEDS,
    with_ceilings: bool = True,
) -> list[RunConfig]:
    """Return the runs of the benchmark, seed by seed, so that the first seed is complete first."""
    runs = [run for name in settings for run in _of_setting(name, scale, cures=cures, with_ceilings=with_ceilings)]
    return [run.model_copy(update={"seed": seed}) for seed in seeds for run in runs]


def _of_setting(name: str, scale: Scale, *, cures: Sequence[str], with_ceilings: bool) -> Iterator[RunConfig]:
    setting = SETTINGS[name]
    for difficulty in setting.names_of_difficulties(scale):
        point = Point(name, difficulty, scale)
        run = base_run(point)
        for cure in cures:
            changes = CURES[cure](point, run)
            if changes is not None:
                yield _placed(run, point, cure, changes)
        if with_ceilings:
            for label in (*setting.hard, *setting.easy):
                yield _placed(run, point, f"ceiling: {label}", _told(run, SupervisedConfig(label=label)))
            for label in setting.hard:
                joint = JointContrastiveConfig(label=label, temperature=TEMPERATURE)
                yield _placed(run, point, f"ceiling: {label}, joint", _told(run, joint))


def _told(run: RunConfig, objective: SupervisedConfig | JointContrastiveConfig) -> Mapping[str, Any]:
    """Return the settings of a run with a label, for which both views have one draw of the overlay."""
    one_draw = run.data.model_copy(update={"overlay": "online"})
    return {"objective": objective, "data": one_draw if run.data.overlay == "online_per_view" else run.data}


def _placed(run: RunConfig, point: Point, cure: str, changes: Mapping[str, Any]) -> RunConfig:
    """Return a run with its changes, its name and its place in the benchmark."""
    factors = point.setting.factors(point.difficulty, scale=point.scale, cure=cure)
    slug = re.sub("[^a-z0-9]+", "-", cure.lower())
    return named(run, slug, tracking=run.tracking.model_copy(update={"factors": factors}), **changes)
