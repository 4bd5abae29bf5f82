"""Recipes, overrides and their mistakes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from configs import studies as of_papers
from configs.resolve import explain, recipes, resolve_recipe, resolve_study, studies
from data_pipeline.core.errors import UserError
from data_pipeline.core.schema import difference
from data_pipeline.overlays.noise import NoiseOptions
from trainer.adversary import AdversaryConfig
from trainer.config import read_config
from trainer.models.encoder import build_encoder
from trainer.models.heads import HeadConfig, build_head
from trainer.objectives import PublishedNTXentConfig
from trainer.optim.optimizers import AdamConfig, LARSConfig, ScheduleConfig, SGDConfig, scaled_learning_rate
from trainer.views.expert_audio import SpectralConfig, WaveformConfig
from trainer.views.expert_image import ExpertImageConfig
from trainer.views.viewmaker import ViewmakerConfig


@pytest.mark.parametrize("name", recipes())
def test_every_recipe_survives_the_round_trip_through_its_config_file(name: str, tmp_path: Path) -> None:
    config = resolve_recipe(name)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.model_dump(mode="json")))
    assert read_config(path) == config
    assert resolve_recipe(str(path)) == config


# The settings of the published code by their files, eight of pictures and three of sounds: seed, samples a batch, the
# budget of a viewmaker. All others are alike.
EXPERT, LEARNED, OF_SOUNDS = (0, 256, None), (2, 256, 0.05), (1337, 128, None)


@pytest.mark.parametrize(
    ("name", "dataset", "numbers"),
    [
        ("simclr:cifar10", "cifar10", EXPERT),
        ("simclr:shapes", "cifar10_shapes", EXPERT),
        ("simclr:digits", "cifar10_digits", EXPERT),
        ("simclr:letters", "cifar10_letters", EXPERT),
        ("viewmaker:cifar10", "cifar10", LEARNED),
        ("viewmaker:shapes", "cifar10_shapes", LEARNED),
        ("viewmaker:digits", "cifar10_digits", LEARNED),
        ("viewmaker:letters", "cifar10_letters", (2, 256, 0.1)),
        ("audio:waveform", "spoken_noise", OF_SOUNDS),
        ("audio:spectral", "spoken_noise", OF_SOUNDS),
        ("audio:viewmaker", "spoken_noise", (1337, 128, 0.125)),
    ],
)
def test_recipes_have_the_numbers_of_the_published_settings(
    name: str, dataset: str, numbers: tuple[int, int, float | None]
) -> None:
    config, (seed, batch_size, budget) = resolve_recipe(name), numbers
    is_sound = dataset == "spoken_noise"
    assert (config.seed, config.global_batch_size, config.num_epochs) == (seed, batch_size, 200)
    assert config.data.train_dir == str(Path(f"data/{dataset}/train").absolute())
    assert config.data.sample_rate == (48_000 if is_sound else None)
    assert config.objective == PublishedNTXentConfig(temperature=0.07)
    assert config.optimizer == SGDConfig(learning_rate=0.03, momentum=0.9, weight_decay=1e-4, schedule=ScheduleConfig())
    assert (config.encoder.kind, config.encoder.embedding_size) == ("resnet18" if is_sound else "resnet18_small", 128)
    assert config.encoder.head == HeadConfig()  # one linear layer
    assert config.encoder.in_channels == (1 if is_sound else 3)
    assert config.precision == "float32"
    if budget is None:
        by_name = {"waveform": WaveformConfig(), "spectral": SpectralConfig()}
        assert config.views == by_name.get(name.partition(":")[2], ExpertImageConfig())
        assert config.adversary is None
    else:
        # Two differences are meant, and have settings: views of pictures are clamped, and one pass serves both players.
        assert config.views == ViewmakerConfig(budget=budget, num_res_blocks=3, clamp=not is_sound)
        adam = AdamConfig(learning_rate=1e-3, betas=(0.9, 0.999), weight_decay=0.0)
        assert config.adversary == AdversaryConfig(update="simultaneous", weight=1.0, optimizer=adam)
    if is_sound:
        assert NoiseOptions().noise_volume == 0.05


def test_the_published_policies_have_the_published_numbers() -> None:
    spectral, waveform, pictures = SpectralConfig(), WaveformConfig(), ExpertImageConfig()
    assert (spectral.max_masked_bands, spectral.max_masked_frames, spectral.mask_tries) == (39, 39, 4)
    assert (spectral.noise_std, waveform.kept) == (0.25, (0.08, 1.0))
    assert waveform.noise_std == pytest.approx(0.00447, rel=1e-3)
    assert (pictures.area, pictures.aspect, pictures.flip_probability) == ((0.2, 1.0), (3 / 4, 4 / 3), 0.5)
    assert (pictures.jitter_probability, pictures.grayscale_probability, pictures.blur_probability) == (0.8, 0.2, 0.5)
    assert (pictures.brightness, pictures.contrast, pictures.saturation, pictures.hue) == (0.4, 0.4, 0.4, 0.1)
    assert (pictures.blur, pictures.blur_sigma) == ("pil", (0.1, 2.0))


def test_published_recipes_normalise_by_the_published_numbers_whatever_the_train_set() -> None:
    for name in ("simclr:cifar10", "simclr:letters", "viewmaker:digits", "viewmaker:shapes_masked"):
        encoder = resolve_recipe(name).encoder
        assert (encoder.mean, encoder.std) == ((0.491, 0.482, 0.446), (0.247, 0.243, 0.261))
    for name in ("huang:simclr", "huang:moco", "huang:simsiam", "huang:barlow_twins"):
        encoder = resolve_recipe(name).encoder
        assert (encoder.mean, encoder.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert resolve_recipe("demo:expert").encoder.normalization is None


def test_data_are_found_from_other_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = "{a: {train_dir: a/train, weight: 1}, b: {train_dir: 's3://bucket/b', weight: 1}}"
    overrides = ["data.train_dir=null", f"data.mixture={sources}", "data.test_dir=~/test"]
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    data = resolve_recipe("debug:image", overrides).data
    locations = (*data.train_locations.values(), data.test_dir)
    assert locations == (str(tmp_path / "a/train"), "s3://bucket/b", str(tmp_path / "home" / "test"))
    assert {Path(run.data.test_dir).is_relative_to(tmp_path) for run in resolve_study("studies:debug_seeds")} == {True}


FOR_FOLDERS = ["simclr:folder", "simclr:folder_small", "viewmaker:folder", "viewmaker:folder_small"]


@pytest.mark.parametrize("name", FOR_FOLDERS)
def test_recipes_for_own_pictures_take_their_numbers_and_their_name_from_the_data(name: str) -> None:
    config = resolve_recipe(name, ["data.train_dir=data/My photos/train", "data.test_dir=data/My photos/test"])
    module, ending = name.split(":")[0], "-small" if name.endswith("_small") else ""
    assert config.name == f"{module}-My-photos{ending}"
    assert config.encoder.normalization is None
    assert config.data.overlay == "online"
    assert resolve_recipe(name).name == f"{module}-folder{ending}"
    assert resolve_recipe(name, ["name=other", "data.train_dir=x/train"]).name == "other"
    (line,) = [line for line in explain(name, ["data.train_dir=data/birds/train"]).splitlines() if line[:5] == "name "]
    assert line.split()[1:] == [f"{module}-birds{ending}", name]


@pytest.mark.parametrize(
    ("location", "name"),
    [
        ("data/photos/train", "photos"),
        ("https://host:8000/birds/train/", "birds"),
        ("../写真/train", "data"),
        ("/data/birds/train-{0000..0009}.tar", "birds"),
    ],
)
def test_the_name_of_data_is_the_name_of_their_folder(location: str, name: str) -> None:
    assert resolve_recipe("simclr:folder", [f"data.train_dir={json.dumps(location)}"]).name == f"simclr-{name}"


@pytest.mark.parametrize(
    ("name", "learning_rate", "num_head_parameters"),
    [
        ("huang:simclr", 0.06, 328_320),
        ("huang:moco", 0.08, 328_320),
        ("huang:simsiam", 0.05, 5_255_168),
        ("huang:barlow_twins", 0.11, 9_455_616),
    ],
)
def test_the_recipes_of_huang_have_the_published_numbers(
    name: str, learning_rate: float, num_head_parameters: int
) -> None:
    config = resolve_recipe(name)
    assert (config.global_batch_size, config.num_epochs, config.optimizer.weight_decay) == (512, 800, 5e-4)
    assert config.optimizer.learning_rate == learning_rate
    assert config.optimizer.schedule.kind == "cosine"
    head = build_head(config.encoder.head, 512, config.encoder.embedding_size, batch_norm="local")
    assert sum(parameter.numel() for parameter in head.parameters()) == num_head_parameters


@pytest.mark.parametrize(("batch_size", "learning_rate"), [(1024, 2.4), (4096, 4.8)])
def test_large_batches_have_the_optimizer_of_chen_et_al(batch_size: int, learning_rate: float) -> None:
    """0.075 times the square root of the batch (appendix B.1); the encoder, the views and the loss are those of 256."""
    config, small = resolve_recipe(f"simclr:digits_{batch_size}"), resolve_recipe("simclr:digits")
    assert config.global_batch_size == batch_size
    optimizer = config.optimizer
    assert isinstance(optimizer, LARSConfig)
    assert scaled_learning_rate(optimizer, global_batch_size=batch_size) == pytest.approx(learning_rate)
    assert optimizer.learning_rate / 256**0.5 == pytest.approx(0.075)
    assert (optimizer.momentum, optimizer.weight_decay, optimizer.trust, optimizer.decay) == (
        0.9,
        1e-6,
        1e-3,
        "matrices",
    )
    assert optimizer.schedule == ScheduleConfig(kind="cosine", warmup_fraction=10 / config.num_epochs)
    assert (config.memory.encoder_checkpointing, config.encoder.batch_norm) == (1, "synchronized")
    changed = {name.partition(".")[0] for name in difference(config, small)}
    assert changed == {"name", "optimizer", "global_batch_size", "memory"}


def test_the_recipes_of_sounds_have_the_published_probe_background_and_encoder() -> None:
    for name in ("audio:spectral", "audio:waveform", "audio:viewmaker"):
        config = resolve_recipe(name)
        assert (config.probe.batch_size, config.probe.learning_rate, config.probe.milestones) == (256, 0.01, ())
        assert config.data.overlay_draw == "per_view"
    encoder = build_encoder(config.encoder)
    assert sum(parameter.numel() for parameter in encoder.parameters()) == 11_235_904
    assert encoder.feature_size(64, 64) == 2_048


def test_a_config_with_a_mapping_can_be_hashed() -> None:
    config = resolve_recipe("debug:image", ["tracking.factors={setting: RandBit, cure: none}"])
    same = resolve_recipe("debug:image", ["tracking.factors={cure: none, setting: RandBit}"])
    other = resolve_recipe("debug:image", ["tracking.factors={setting: RandBit, cure: ifm}"])
    assert config == same
    assert {config: "a", other: "b"}[same] == "a"


@pytest.mark.parametrize(
    ("resolve", "name", "overrides", "message"),
    [
        (resolve_recipe, "simclt:digits", [], 'did you mean "simclr:digits"'),
        (resolve_recipe, "debug:viewmaker", ["adversary=null"], "viewmaker"),
        (resolve_study, "debug:image", [], "unknown study"),
        (resolve_study, "studies:debug_seeds", ["seed=3"], "2 runs called debug-image with seed 3"),
        (resolve_study, "studies:debug_seeds", ["num_epoch=3"], "studies:debug_seeds (debug-image, seed 0)"),
    ],
)
def test_a_mistake_is_one_sentence_that_names_the_mend(
    resolve: Callable[[str, Sequence[str]], object], name: str, overrides: list[str], message: str
) -> None:
    with pytest.raises(UserError) as raised:
        resolve(name, overrides)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", studies())
def test_every_run_of_a_study_survives_the_round_trip(name: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    runs = getattr(of_papers, name.partition(":")[2])()
    of_each_kind = {(run.views.kind, run.objective.kind, run.encoder.kind): run for run in runs}
    for config in of_each_kind.values():
        path.write_text(json.dumps(config.model_dump(mode="json")))
        assert read_config(path) == config


def test_table_1_is_its_eight_recipes_with_three_seeds() -> None:
    names = [
        f"{player}:{row}" for player in ("simclr", "viewmaker") for row in ("cifar10", "shapes", "digits", "letters")
    ]
    runs = resolve_study("studies:table1")
    assert len(runs) == 3 * len(names)
    for number, run in enumerate(runs):
        assert run.seed == number % 3
        assert set(difference(run, resolve_recipe(names[number // 3]))) <= {"seed", "tracking.tags", "tracking.group"}
    assert not [name for name in recipes() if "studies" in name], "a study is no recipe"


def test_an_override_reaches_the_runs_of_a_study_that_have_its_setting() -> None:
    runs = resolve_study("studies:table1", ["views.clamp=false", "adversary.update=alternating"])
    assert {(run.views.kind, getattr(run.views, "clamp", None)) for run in runs} == {
        ("expert_image", None),
        ("viewmaker", False),
    }
    assert {run.adversary and run.adversary.update for run in runs} == {None, "alternating"}
    others = resolve_study("studies:table1", ["objective.kind=nt_xent", "objective.temperature=0.2"])
    assert {(run.objective.kind, getattr(run.objective, "temperature", None)) for run in others} == {("nt_xent", 0.2)}
    for wrong in ("views.clam=false", "views.clamp=7", "optimiser.learning_rate=1", "adversary=3"):
        with pytest.raises(UserError, match=wrong.partition("=")[0].rpartition(".")[2]):
            resolve_study("studies:table1", [wrong])


def test_overrides_reach_every_run_of_a_study() -> None:
    study, changed = resolve_study("studies:debug_seeds"), resolve_study("studies:debug_seeds", ["num_epochs=3"])
    assert {(config.name, config.seed) for config in study} == {
        (name, seed) for name in ("debug-image", "debug-viewmaker") for seed in (0, 1)
    }
    assert [difference(a, b) for a, b in zip(study, changed, strict=True)] == [["num_epochs"]] * 4
