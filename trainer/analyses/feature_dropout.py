"""Measure how often the views of a run destroy a feature that its own or another encoder reads (Tamkin et al. 2022).

Each run's policy makes one view of each of some test samples. Every run's encoder and linear classifier then give the
probability of the right class. A policy that drops a feature completely leaves two groups of views: probabilities near
1 if the view shows the feature, near 0 if not, and few between. A policy that only weakens features leaves one group.

Shapes: N samples, F features, K classes of a label.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from matplotlib.figure import Figure
from pydantic import Field
from torch import Tensor

from data_pipeline.core.errors import UserError
from data_pipeline.core.progress import Progress
from data_pipeline.core.sample import NO_LABEL
from data_pipeline.core.schema import CountOrZero, Measured, Schema, drawn, shown
from trainer.analyses.analysis import Analysis, LoadedRun
from trainer.analyses.dip import Floats, dip, dip_p_value, uniform_dips
from trainer.analyses.views import mean_change, ratio
from trainer.observability.figures import to_png
from trainer.probes.features import LabelSpace, frozen
from trainer.probes.heads import Heads, read_heads
from trainer.probes.linear import LinearHead, accuracy
from trainer.probes.targets import readable_labels
from trainer.probes.view_batches import view_batches

LOW, HIGH = 0.1, 0.9
_NEEDED = {"batch_norm": "eval", "reads": "features"}  # of the probe that fitted the heads


class FeatureDropoutConfig(Schema):
    """The settings of the analysis of feature dropout."""

    num_examples: Annotated[int, Field(ge=10, le=10**6)] = Field(
        1200, description="The test samples, or the views of one sample."
    )
    of_sample: CountOrZero | None = Field(
        None, description="The index of a test sample: all views are then views of this one."
    )
    num_bins: Annotated[int, Field(ge=10, le=10**6)] = Field(20, description="The bins of each histogram.")
    num_uniform_samples: Annotated[int, Field(ge=1, le=10**6)] = Field(
        999, description="The uniform samples that the dip test compares with."
    )


class Probabilities(Schema):
    """The distribution of probabilities of the right class over [0, 1].

    histogram: the shares of bins of equal width.
    dip_p: the probability of a dip at least this large if there is one mode.
    tails_exceed_middle: if the shares below 0.1 and above 0.9 both exceed the share of every tenth between.

    All are None if a probability is not finite, as for views of a diverged viewmaker.
    """

    histogram: tuple[Measured, ...]
    mean: Measured = None
    share_below_0_1: Measured = None
    share_above_0_9: Measured = None
    dip: Measured = None
    dip_p: Measured = None
    tails_exceed_middle: bool | None = None


class JudgedRun(Schema):
    """A run with its policy and its classifier.

    accuracy, without_views: of the examples without views, by label. Compare the histograms of views with these.
    selectivity_box, selectivity_object: the policy's mean absolute change inside the box of the drawn object, or on its
        pixels, over the mean change of the whole picture; None for sounds and if nothing was drawn.
    """

    name: str
    checkpoint_step: int
    views: str
    classifier: str
    accuracy: dict[LabelSpace, Measured]
    without_views: dict[LabelSpace, Probabilities]
    selectivity_box: Measured
    selectivity_object: Measured


class Judgement(Schema):
    """Views of one run under the encoder and classifier of another run, or of its own.

    accuracy: on the views; None if a feature is not finite.
    """

    views_of: str
    judged_by: str
    label: LabelSpace
    accuracy: Measured
    probabilities: Probabilities


class FeatureDropoutResult(Schema):
    """analysis/feature_dropout.json, the same in every run that took part."""

    config: FeatureDropoutConfig
    seed: int
    num_examples: int
    runs: tuple[JudgedRun, ...]
    judgements: tuple[Judgement, ...]
    test_manifest_sha256: str


@dataclass(frozen=True)
class Judge:
    """A run whose encoder and classifiers read the views of all runs."""

    name: str
    loaded: LoadedRun
    heads: Heads


def measure(loaded_runs: Sequence[LoadedRun], config: FeatureDropoutConfig) -> tuple[FeatureDropoutResult, bytes]:
    """Return the judgements of every run on the views of all, also its own, and the figure.

    Raises `UserError` if a run is given twice, or if the runs have different test sets.
    """
    judges, common = judges_of(loaded_runs, analysis="feature_dropout")
    first = loaded_runs[0]
    rows_N, index_N = _examples(first, config)
    if all((first.test.by_label[space][rows_N] == NO_LABEL).all() for space in common):
        lacking = " or ".join(f"label_{space}" for space in common)
        raise UserError(
            f"no example has {lacking}, so there is no right class; take another of_sample, or more samples"
        )
    runs, judgements = [], []
    with Progress("views judged", total=len(judges) * len(rows_N)) as progress:
        for policy in judges:
            run, judged = _judge(policy, judges, common, rows_N, index_N, config, seed=first.seed, progress=progress)
            runs.append(run)
            judgements += judged
    result = FeatureDropoutResult(
        config=config,
        seed=first.seed,
        num_examples=len(rows_N),
        runs=tuple(runs),
        judgements=tuple(judgements),
        test_manifest_sha256=first.test.manifest.sha256,
    )
    return result, _figure(result)


ANALYSIS = Analysis("feature_dropout", FeatureDropoutConfig, measure, compares_runs=True, in_name="of_sample")


def judges_of(loaded_runs: Sequence[LoadedRun], *, analysis: str) -> tuple[list[Judge], list[LabelSpace]]:
    """Return the runs as judges, and the labels that all of them were probed for.

    Raises `UserError` if a run is given twice or was not probed, or if the runs have different test sets.
    """
    if len({loaded.run_dir.path.resolve() for loaded in loaded_runs}) < len(loaded_runs):
        raise UserError(f"{analysis} lets runs judge one another's views; name each run directory once")
    first = loaded_runs[0]
    for loaded in loaded_runs[1:]:
        if loaded.test.manifest.sha256 != first.test.manifest.sha256:
            raise UserError(
                f"{first.run_dir.path} and {loaded.run_dir.path} have different test sets; "
                f"{analysis} compares runs of one dataset"
            )
    judges = [
        Judge(name, loaded, heads_of(loaded)) for name, loaded in zip(_names(loaded_runs), loaded_runs, strict=True)
    ]
    common = [space for space in first.test.class_labels if all(space in judge.heads.by_label for judge in judges)]
    if not common:
        raise UserError("the runs were not probed for a common label; run `python -m trainer.probe` on each of them")
    return judges, common


def heads_of(loaded: LoadedRun) -> Heads:
    """Return the heads that the probe saved with the checkpoint of a loaded run, on its device.

    The encoder is in eval mode, so heads that were fitted in train mode are never used. Nor are heads on something else
    than the features.

    Raises `UserError` if the run was not probed at this step, if the file is damaged, or if its heads do not fit this
    train set and encoder.
    """
    data = loaded.config.data
    where = (data.probed_dir, data.test_dir)
    labels = readable_labels(loaded.train.manifest, loaded.test.manifest, where=where)
    # With another probe in its config, the fitting heads are in the file of a probe with these options.
    own = loaded.config.probe
    changes = {name: value for name, value in _NEEDED.items() if getattr(own, name) != value}
    suffix = "".join(f"-{name}_{value}" for name, value in changes.items())
    path = loaded.run_dir.probes(loaded.modules.step) / f"heads{suffix}.safetensors"
    if not path.is_file():
        options = "".join(f" --set {name}={value}" for name, value in changes.items())
        raise UserError(
            f"{path} does not exist; fit the heads with `python -m trainer.probe {loaded.run_dir.path} --step "
            f"{loaded.modules.step}{options}`"
        )
    heads = read_heads(path, device=loaded.device)
    num_features = loaded.modules.encoder.feature_size(*loaded.test.size)
    expected = {space: (len(names), num_features) for space, names in labels.items()}
    found = {space: tuple(head.weight_KF.shape) for space, head in heads.by_label.items()}
    if heads.train_manifest_sha256 != loaded.train.manifest.sha256 or not found.items() <= expected.items():
        raise UserError(f"{path} was fitted on another train set or encoder; remove it")
    return heads


def _examples(loaded: LoadedRun, config: FeatureDropoutConfig) -> tuple[Tensor, Tensor]:
    """Return the rows (N,) of the test set, and the indices (N,) that draw their views."""
    if config.of_sample is None:
        rows_N = loaded.choose_rows(loaded.test, config.num_examples)
        return rows_N, loaded.test.samples.index_B[rows_N]
    indices_M = loaded.test.samples.index_B  # not the numbers of the rows, because samples may be left out
    rows = (indices_M == config.of_sample).nonzero()
    if not len(rows):
        least, most = int(indices_M.min()), int(indices_M.max())
        raise UserError(
            f"of_sample={config.of_sample}, but the test set has samples from {least} to {most}; take another"
        )
    index_N = torch.arange(config.num_examples)
    return torch.full_like(index_N, int(rows[0])), index_N


def right_class_probability(head: LinearHead, features_NF: Tensor, label_N: Tensor) -> Tensor:
    """Return the softmax probability (N,) float64 that a head gives to the classes (N,) int64.

    Leaves out samples that lack the label.
    """
    if (label_N == NO_LABEL).any():
        features_NF, label_N = features_NF[label_N != NO_LABEL], label_N[label_N != NO_LABEL]
    return head.logits(features_NF).double().softmax(1).gather(1, label_N[:, None])[:, 0]


def describe(probability_N: Floats, *, num_bins: int, uniform_dips_D: Floats) -> Probabilities:
    """Describe probabilities (N,); `uniform_dips_D` are the dips of uniform samples of the same size."""
    if not np.isfinite(probability_N).all():
        return Probabilities(histogram=(None,) * num_bins)
    counts, _ = np.histogram(probability_N, bins=num_bins, range=(0.0, 1.0))
    tenths, _ = np.histogram(probability_N, bins=10, range=(0.0, 1.0))
    value = dip(probability_N)
    return Probabilities(
        histogram=tuple((counts / counts.sum()).tolist()),
        mean=float(probability_N.mean()),
        share_below_0_1=float((probability_N < LOW).mean()),
        share_above_0_9=float((probability_N > HIGH).mean()),
        dip=value,
        dip_p=dip_p_value(value, uniform_dips_D),
        tails_exceed_middle=bool(min(tenths[0], tenths[-1]) > tenths[1:-1].max()),
    )


def _judge(
    policy: Judge,
    judges: Sequence[Judge],
    spaces: Sequence[LabelSpace],
    rows_N: Tensor,
    index_N: Tensor,
    config: FeatureDropoutConfig,
    *,
    seed: int,
    progress: Progress,
) -> tuple[JudgedRun, list[Judgement]]:
    """Return the judgements of every run on one policy's views, and a description of the policy's own run."""
    loaded = policy.loaded
    labels = {
        space: loaded.test.by_label[space][rows_N].to(loaded.device)
        for space in spaces
        if (loaded.test.by_label[space][rows_N] != NO_LABEL).any()
    }
    features: dict[str, list[Tensor]] = {judge.name: [] for judge in judges}
    plain, changes = [], []
    with frozen(*(judge.loaded.modules.encoder for judge in judges)):
        for batch in view_batches(
            loaded.modules.view_policy,
            loaded.test,
            rows_N,
            seed=seed,
            view=0,
            device=loaded.device,
            index_N=index_N,
        ):
            for judge in judges:
                features[judge.name].append(judge.loaded.modules.encoder.features(batch.views_BCHW))
            plain.append(loaded.modules.encoder.features(batch.seen_BCHW))
            changes.append((batch.change(), batch.masks_BHW))
            progress.advance(len(batch.views_BCHW))

    def probabilities(head: LinearHead, features_NF: Tensor, label_N: Tensor) -> Probabilities:
        probability_N = right_class_probability(head, features_NF, label_N).cpu().numpy()
        uniform = uniform_dips(len(probability_N), num_draws=config.num_uniform_samples, seed=seed)
        return describe(probability_N, num_bins=config.num_bins, uniform_dips_D=uniform)

    change, in_box, in_object = mean_change(changes)
    plain_NF, heads = torch.cat(plain), policy.heads.by_label
    run = JudgedRun(
        name=policy.name,
        checkpoint_step=loaded.modules.step,
        views=loaded.modules.config.views.kind,
        classifier=policy.heads.made_by,
        accuracy={space: accuracy(heads[space].classes(plain_NF), label_N) for space, label_N in labels.items()},
        without_views={space: probabilities(heads[space], plain_NF, label_N) for space, label_N in labels.items()},
        selectivity_box=ratio(in_box, change),
        selectivity_object=ratio(in_object, change),
    )
    judgements = []
    for judge in judges:
        features_NF = torch.cat(features[judge.name])
        for space, label_N in labels.items():
            head = judge.heads.by_label[space]
            judgements.append(
                Judgement(
                    views_of=policy.name,
                    judged_by=judge.name,
                    label=space,
                    accuracy=accuracy(head.classes(features_NF), label_N),
                    probabilities=probabilities(head, features_NF, label_N),
                )
            )
    return run, judgements


def _names(loaded_runs: Sequence[LoadedRun]) -> list[str]:
    """Return the names in the configs, or the directories if two runs share a name."""
    names = [loaded.modules.config.name for loaded in loaded_runs]
    return names if len(set(names)) == len(names) else [str(loaded.run_dir.path) for loaded in loaded_runs]


def _figure(result: FeatureDropoutResult) -> bytes:
    """Draw a histogram for each policy (row) and judge (column), of each label, and of samples without views.

    The last label is filled, and shown without views too.
    """
    names = [run.name for run in result.runs]
    by_place = {(j.views_of, j.judged_by, j.label): j for j in result.judgements}
    spaces = [j.label for j in result.judgements if (j.views_of, j.judged_by) == (names[0], names[0])]
    figure = Figure(figsize=(3.6 * len(names) + 0.4, 2.7 * len(names) + 0.5), layout="constrained")
    grid = figure.subplots(len(names), len(names), sharex=True, sharey=True, squeeze=False)
    edges = np.linspace(0, 1, result.config.num_bins + 1)
    for row, views_of in enumerate(names):
        for column, judged_by in enumerate(names):
            axes = grid[row, column]
            for number, space in enumerate(spaces, 1):
                spread = by_place[views_of, judged_by, space].probabilities
                strong = space == spaces[-1]
                axes.stairs(
                    drawn(spread.histogram),
                    edges,
                    fill=strong,
                    color="C0" if strong else f"C{number}",
                    linewidth=1.5,
                    alpha=0.75 if strong else 1.0,
                    label=f"label_{space}: dip {shown(spread.dip, '.3f')}, p {shown(spread.dip_p, '.3f')}",
                )
            as_they_are = result.runs[column].without_views[spaces[-1]].histogram
            axes.stairs(
                drawn(as_they_are), edges, color="0.35", linestyle="--", label=f"label_{spaces[-1]}, without views"
            )
            axes.legend(fontsize=7, loc="upper center", frameon=False)
            axes.spines[["top", "right"]].set_visible(False)
            if row == 0:
                axes.set_title(f"judged by\n{judged_by}", fontsize=9)
            if row == len(names) - 1:
                axes.set_xlabel("probability of the right class")
            if column == 0:
                axes.set_ylabel(f"views of\n{views_of}\nshare of examples", fontsize=9)
    every = [judgement.probabilities for judgement in result.judgements]
    every += [run.without_views[spaces[-1]] for run in result.runs]
    top = max((share for one in every for share in one.histogram if share is not None), default=1.0)
    grid[0, 0].set(xlim=(0, 1), ylim=(0, 1.25 * top))  # room for the legends
    return to_png(figure)
