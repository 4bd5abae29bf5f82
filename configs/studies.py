"""Studies: sets of runs to compare. A study is a function that returns their RunConfigs.

python launch/slurm.py --study studies:table1 --at-a-time 4 --gpus-per-node 8
python launch/status.py runs/table1
python -m trainer.probe runs/table1 --untrained
python -m trainer.report --study table1 runs/table1

Each run has its own directory, runs/STUDY/NAME-seedSEED. The report shows the measured numbers beside the published
ones. At the scale of the papers, every recipe runs with three seeds, including the published seed. Tamkin et al. used
only one seed, but without a deviation no difference can be told from chance.

Studies `..._small` are the same tables for a CPU: a ResNet-10 of width 16 on a few thousand samples for some epochs.
Their accuracies mean nothing by themselves, so the report compares only directions. To run one without a cluster:

    python launch/slurm.py --executor local --study studies:table1_small --at-a-time 2

This builds their shards. If you have only MNIST's test digits, add `--digits mnist_t10k`:

    python -m data_pipeline papers --root DIR --out data --small
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from configs import audio, debug, huang, simclr, viewmaker
from configs.base import changed, data, named, overridden
from configs.suppression import benchmark
from trainer.config import RunConfig
from trainer.models.encoder import ResNetConfig, WideResNet34x5Config
from trainer.objectives import LinearLossConfig, NTXentConfig, PublishedNTXentConfig, SplitLossConfig, SupervisedConfig
from trainer.probes.linear import ProbeConfig
from trainer.views.expert_image import NO_VIEWS, huang_views
from trainer.views.random_mask import RandomMaskConfig

_SEEDS = (0, 1, 2)  # Tamkin et al. used 0 and 2 for pictures, Huang et al. all three
_SOUND_SEEDS = (0, 1, 1337)  # Tamkin et al. used 1337 for sounds
_HUANG_EVERY_STEPS = 970  # ten epochs, between two kNN evaluations on the whole train and test set
_ROWS = ("cifar10", "shapes", "digits", "letters")
_ADDED = ("abcde", "abcd", "abc", "ab", "a")
_STRENGTHS = (1.0, 0.5, 0.25, 0.125)
_PAIRS = ("ab", "ac", "ad", "ae", "bc", "bd", "be", "cd", "ce", "de")


def table1() -> list[RunConfig]:
    """Table 1 of Tamkin et al. (2022): expert views and a viewmaker, on CIFAR-10 and with three overlays; 24 runs."""
    runs = [getattr(module, row)() for module in (simclr, viewmaker) for row in _ROWS]
    return _seeded(runs, _SEEDS)


def table1_as_code() -> list[RunConfig]:
    """Table 1 with three choices of the published code that are not our defaults; 24 runs.

    Views are not clamped, the encoder's step comes before the viewmaker's pass, and probes are fitted with batch norm
    in train mode.
    """
    alike = ["views.clamp=false", "adversary.update=alternating", "probe.batch_norm=train"]
    return overridden(table1(), alike, where="table1")


def table1_as_paper() -> list[RunConfig]:
    """Table 1 with the temperature of 0.1 and the budget of 0.05 for letters, as the paper has them; 24 runs."""
    return overridden(table1(), ["objective.temperature=0.1", "views.budget=0.05"], where="table1")


def table2() -> list[RunConfig]:
    """Table 2 of Tamkin et al. (2022): two expert policies and a viewmaker on speech, backgrounds and both; 27 runs."""
    policies = ("spectral", "waveform", "viewmaker")
    recipes = [getattr(audio, f"{policy}{ending}") for ending in ("_speech", "_sound", "") for policy in policies]
    return _seeded([recipe() for recipe in recipes], _SOUND_SEEDS)


def table3() -> list[RunConfig]:
    """Table 3 of Tamkin et al. (2022): a viewmaker, and a viewmaker that cannot change the object; 18 runs."""
    recipes = [getattr(viewmaker, f"{row}{ending}") for ending in ("", "_masked") for row in _ROWS[1:]]
    return _seeded([recipe() for recipe in recipes], _SEEDS)


def richness() -> list[RunConfig]:
    """The table of richer views of Huang et al. (2023): five sets of transforms, four methods, CIFAR-10 and CIFAR-100.

    With three seeds these are 120 runs of 800 epochs.
    """
    runs = [named(recipe, letters, views=huang_views(letters)) for recipe in _huang() for letters in _ADDED]
    return _seeded(runs, _SEEDS)


def colour() -> list[RunConfig]:
    """The table of colour strengths of Huang et al. (2023): crop and jitter of four strengths; 96 runs."""
    runs = [
        named(recipe, f"ad-strength{strength:g}", views=huang_views("ad", strength=strength, jitter_probability=1.0))
        for recipe in _huang()
        for strength in _STRENGTHS
    ]
    return _seeded(runs, _SEEDS)


def temperatures() -> list[RunConfig]:
    """The table "Ours" of Huang et al. (2023): SimCLR at two temperatures and the split loss, four lengths; 36 runs.

    The paper does not give the weight of the split loss or the dataset, and does not say whether each row is a run.
    Here the weight is twice the temperature, and each row is a run whose learning rate falls to 0.
    """
    base = huang.simclr()
    losses = {
        "simclr-t1": NTXentConfig(temperature=1.0),
        "simclr-t0.5": NTXentConfig(temperature=0.5),
        "split-t0.2": SplitLossConfig(),
    }
    runs = [
        changed(base, name=f"{name}-{epochs}epochs", objective=loss, num_epochs=epochs)
        for name, loss in losses.items()
        for epochs in (200, 400, 600, 800)
    ]
    return _seeded(_with_knn(runs), _SEEDS)


def pairs() -> list[RunConfig]:
    """The figure of pairs of transforms of Huang et al. (2023): SimCLR with two transforms, 200 epochs; 30 runs."""
    base = changed(_with_knn([huang.simclr()])[0], num_epochs=200)
    runs = [named(base, f"{letters}-200epochs", views=huang_views(letters)) for letters in _PAIRS]
    return _seeded(runs, _SEEDS)


def sharing() -> list[RunConfig]:
    """Shared or separate backgrounds for the two views of a sound, for each policy of Table 2; 18 runs.

    The published runs have separate backgrounds. There are no published numbers for shared backgrounds.
    """
    runs = []
    for recipe in (audio.spectral(), audio.waveform(), audio.viewmaker()):
        runs += [named(recipe, "per-item", data=recipe.data.model_copy(update={"overlay": "online"})), recipe]
    return _seeded(runs, _SOUND_SEEDS)


def ablations() -> list[RunConfig]:
    """Ablations of choices in which paper, code and common practice differ, on C+Shapes and C+Digits; 48 runs.

    Each changes one choice of the rows of Table 1: the temperature of the paper (the code has 0.07); NT-Xent in both
    directions, without the anchor among its negatives; views without a clamp, as in the code; two passes in each step,
    as in the code. The published mode of batch norm in the probe needs no run: use `trainer.probe --set
    batch_norm=train`. There are no published numbers.
    """
    losses: dict[str, dict[str, Any]] = {
        "t0.1": {"objective": PublishedNTXentConfig(temperature=0.1)},
        "nt-xent": {"objective": NTXentConfig(temperature=0.07)},
    }
    runs = []
    for row in ("shapes", "digits"):
        expert, learned = getattr(simclr, row)(), getattr(viewmaker, row)()
        as_in_code: dict[str, dict[str, Any]] = {
            "unclamped": {"views": learned.views.model_copy(update={"clamp": False})},
            "alternating": {"adversary": learned.adversary.model_copy(update={"update": "alternating"})},
        }
        runs += [expert, *(named(expert, name, **change) for name, change in losses.items())]
        runs += [learned, *(named(learned, name, **change) for name, change in (losses | as_in_code).items())]
    return _seeded(runs, _SEEDS)


def large_batches() -> list[RunConfig]:
    """C+Digits in batches of 256 as published, 1,024, 4,096, and 4,096 in four micro batches; 12 runs.

    The last two have the same negatives. In micro batches, batch norm sees 1,024 samples, as in the second. There are
    no published numbers.
    """
    large = simclr.digits_4096()
    parts = named(large, "parts", memory=large.memory.model_copy(update={"micro_batches": 4}))
    return _seeded([simclr.digits(), simclr.digits_1024(), large, parts], _SEEDS)


def firing() -> list[RunConfig]:
    """Figures 1 to 4 of Wen and Li (2021): three contrastive arms and a supervised one, for `trainer.analyze filters`.

    The contrastive arms have no augmentation, crops, and crops with SimCLR's distortion of colours: jitter and grey.
    The supervised one has crops. The network is that of the paper. The paper does not describe the training; here it is
    SimCLR as in Huang et al.
    """
    base = huang.simclr()
    network = WideResNet34x5Config.model_validate(
        base.encoder.model_dump(exclude={"kind", "stem_relu", "init", "width"})
    )
    views = {
        "none": NO_VIEWS,
        "crop": huang_views("a"),
        "crop-colour": huang_views("acd"),
        "supervised": huang_views("a"),
    }
    runs = [named(base, name, views=chosen, encoder=network, num_epochs=200) for name, chosen in views.items()]
    runs[-1] = changed(runs[-1], objective=SupervisedConfig())
    return _seeded(runs, _SEEDS)


def masks() -> list[RunConfig]:
    """Random masks (Wen and Li 2021) and the linear loss (Huang et al. 2023) on C+Digits; 12 runs.

    The views are expert views, none, or random masks, with the loss of Table 1; and expert views with the linear loss.
    Neither paper trains an encoder of pictures in this way.
    """
    base = simclr.digits()
    runs = [
        base,
        named(base, "none", views=NO_VIEWS),
        named(base, "mask", views=RandomMaskConfig()),
        named(base, "linear", objective=LinearLossConfig()),
    ]
    return _seeded(runs, _SEEDS)


def suppression() -> list[RunConfig]:
    """Feature suppression: every setting, every cure, every difficulty and three seeds, for a cluster."""
    return benchmark(scale="full")


def suppression_small() -> list[RunConfig]:
    """Feature suppression for a CPU: every setting and cure, three difficulties, three seeds; 1,551 runs."""
    return benchmark(scale="small")


def suppression_quick() -> list[RunConfig]:
    """Feature suppression in five minutes: RandBit with three cures and one seed; 9 runs."""
    cures = ("SimCLR", "temperature 0.05", "viewmaker")
    return benchmark(scale="small", settings=("randbit",), cures=cures, seeds=(0,), with_ceilings=False)


def debug_seeds() -> list[RunConfig]:
    """Expert views and a viewmaker with two seeds each, on the data of debug.py; a minute on a CPU."""
    return _seeded([debug.image(), debug.viewmaker()], (0, 1))


def _seeded(runs: Sequence[RunConfig], seeds: Sequence[int]) -> list[RunConfig]:
    return [run.model_copy(update={"seed": seed}) for run in runs for seed in seeds]


def _huang() -> list[RunConfig]:
    """Return the runs with all five transforms for each method, on CIFAR-10 and on CIFAR-100."""
    methods = (huang.simclr, huang.barlow_twins, huang.moco, huang.simsiam)
    return _with_knn([method(dataset) for dataset in ("cifar10", "cifar100") for method in methods])


def _with_knn(runs: Sequence[RunConfig]) -> list[RunConfig]:
    """Return the runs with regular kNN evaluations on all train and test pictures; the paper reports the best one."""
    every = {"online_every_steps": _HUANG_EVERY_STEPS, "online_num_train": 50_000, "online_num_test": 10_000}
    return [changed(run, probe=run.probe.model_copy(update=every)) for run in runs]


def _small_form(
    study: Callable[[], list[RunConfig]],
    *,
    seeds: Sequence[int] = _SEEDS,
    only: str = "",
    epochs: Mapping[int, int] = MappingProxyType({}),
    batch_sizes: Mapping[int, int] = MappingProxyType({}),
) -> Callable[[], list[RunConfig]]:
    """Return the study of the same runs, each in a form that takes minutes on a CPU, once for each seed.

    `only` is a part of the names of the runs that it has. `epochs` and `batch_sizes` give the numbers for some numbers
    in the large study; others have 6 epochs in batches of 64.
    """

    def small() -> list[RunConfig]:
        by_name = {run.name: run for run in study() if only in run.name}
        runs = [
            _small_run(run, epochs.get(run.num_epochs, 6), batch_sizes.get(run.global_batch_size, 64))
            for run in by_name.values()
        ]
        return _seeded(runs, seeds)

    small.__doc__ = f"`{study.__name__}` for a CPU."
    return small


def _small_run(run: RunConfig, num_epochs: int, batch_size: int) -> RunConfig:
    sounds, views, encoder = run.data.sample_rate is not None, run.views, run.encoder
    if views.is_learned:
        views = views.model_copy(update={"base_width": 8, "num_res_blocks": 1})
    narrow = tuple(min(size, 256) for size in encoder.head.hidden_sizes)
    dataset = run.data.probed_dir.split("/")[-2]
    return named(
        run,
        "small",
        data=data(
            f"small/{dataset}",
            num_workers=0,
            overlay=run.data.overlay,
            sample_rate=8_000 if sounds else None,
        ),
        views=views,
        encoder=ResNetConfig(
            kind="resnet10",
            in_channels=encoder.in_channels,
            mean=encoder.mean,
            std=encoder.std,
            head=encoder.head.model_copy(update={"hidden_sizes": narrow}),
            embedding_size=min(encoder.embedding_size, 256),
            batch_norm=encoder.batch_norm,
        ),
        global_batch_size=batch_size,
        num_epochs=num_epochs,
        # The rate drops twice for sounds too, unlike in audio.py: docs/claims.md was measured with this.
        probe=ProbeConfig(num_epochs=20, views="none", batch_norm=run.probe.batch_norm),
    )


table1_small = _small_form(table1)
table1_as_code_small = _small_form(table1_as_code)
table1_as_paper_small = _small_form(table1_as_paper)
table2_small = _small_form(table2)
table3_small = _small_form(table3)
richness_small = _small_form(richness, seeds=(0,), only="cifar10-")
colour_small = _small_form(colour, seeds=(0,), only="cifar10-")
temperatures_small = _small_form(temperatures, seeds=(0,), epochs={200: 2, 400: 4, 600: 6, 800: 8})
pairs_small = _small_form(pairs, seeds=(0,))
sharing_small = _small_form(sharing)
ablations_small = _small_form(ablations, seeds=(0,), only="digits")
large_batches_small = _small_form(large_batches, seeds=(0,), batch_sizes={1024: 256, 4096: 1024})
firing_small = _small_form(firing)
masks_small = _small_form(masks)
