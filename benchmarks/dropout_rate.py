"""How often a viewmaker destroys a feature, against `dropout_rate` at one budget, and against the budget without it.

    python -m benchmarks.dropout_rate [--train-dir DIR --test-dir DIR] [--epochs N] [--seeds S ...] [--budget B]
                                      [--with-budgets] [--out JSON] [--figure PNG]

A judge is trained with labels, on pictures without views, to predict the picture's class and the class of the object
drawn on it. Then SimCLR trains a small encoder against a small viewmaker, once for every setting and seed. The judge
sees views of the test pictures that it reads with a probability above 0.9 without a view. A feature counts as destroyed
if the probability of its class is below 0.1, and as kept if it is above 0.9 (cf. the histograms of Tamkin et al. 2022,
appendix C.2). One of the trained viewmakers is also held fixed and used at every rate.

Without directories, drawn pictures with handwritten digits are built in a temporary folder, and the digits are drawn
anew in every epoch. One thread.

Shapes: N pictures, V views of each, B batch, C channels, H height, W width, K classes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from matplotlib.figure import Figure
from scipy.stats import linregress
from torch import Tensor
from torch.nn import functional as F

from benchmarks.record import on_one_core, rounded, save
from configs import demo
from configs.base import CIFAR10_MEAN, CIFAR10_STD, changed
from data_pipeline.building.build import build_dataset
from data_pipeline.core.counter_rng import DrawKeys
from data_pipeline.core.errors import UserError, run_command
from data_pipeline.core.progress import Progress
from data_pipeline.core.sample import BASE, OVERLAY
from data_pipeline.loading.order import num_steps_per_epoch
from data_pipeline.storage.manifest import load_manifest
from trainer.config import RunConfig
from trainer.data import open_stream
from trainer.models.encoder import Encoder, ResNetConfig, build_encoder
from trainer.pretrained import load_modules
from trainer.probes.features import LabelSpace, Pictures, frozen, read_pictures, to_float
from trainer.run_dir import RunDir
from trainer.train import train
from trainer.views.viewmaker import Pairing, Viewmaker, ViewmakerConfig, attacked_views

CPU = torch.device("cpu")
PACKAGES = ("torch", "numpy")
SPACES = (BASE, OVERLAY)
JUDGE_EPOCHS, JUDGE_BATCH, JUDGE_SEED = 12, 64, 0
NUM_VIEWS = 2  # of each test picture
MEASURED_SEED = 1_000  # seed of the measured views, which no training uses
DESTROYED_BELOW, KEPT_ABOVE = 0.1, 0.9
MIN_PICTURES = 100  # the judge must read at least so many
RATES = (0.1, 0.25, 0.5, 0.75, 1.0)
HELD_RATE = 0.25  # training rate of the viewmaker that is used at every rate
BUDGETS = (0.05, 0.1, 0.2, 0.4)  # without a dropout rate; a rate of 1 is the same


@dataclass(frozen=True)
class Setting:
    """The varied settings: `dropout_rate`, or the budget if `dropout_rate` is None.

    `trained` says how the measured viewmaker was trained: at this setting, at the rate `HELD_RATE`, or not at all.
    """

    budget: float
    dropout_rate: float | None = None
    dropout_pairing: Pairing = "independent"
    trained: Literal["at this setting", "at another rate", "not at all"] = "at this setting"

    @property
    def views(self) -> ViewmakerConfig:
        return ViewmakerConfig(
            base_width=8,
            num_res_blocks=1,
            budget=self.budget,
            dropout_rate=self.dropout_rate,
            dropout_pairing=self.dropout_pairing,
        )


@dataclass(frozen=True)
class Judge:
    """A classifier of both labels of a picture, with one softmax for each label space."""

    network: Encoder
    num_classes: Mapping[LabelSpace, int]

    def probabilities(self, images_BCHW: Tensor, labels: Mapping[LabelSpace, Tensor]) -> dict[LabelSpace, Tensor]:
        """Return the probability of the right class in each label space, (B,)."""
        logits = torch.split(self.network(images_BCHW), list(self.num_classes.values()), dim=1)
        return {
            space: logits_BK.softmax(1).gather(1, labels[space][:, None])[:, 0]
            for space, logits_BK in zip(self.num_classes, logits, strict=True)
        }


def train_judge(config: RunConfig, test: Pictures) -> Judge:
    """Train a judge with labels, on the train pictures without views, with overlays drawn as in the runs."""
    num_classes = {space: len(test.class_names(space)) for space in SPACES}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(JUDGE_SEED)
        network = build_encoder(
            ResNetConfig(
                kind="resnet10",
                width=8,
                batch_norm="local",
                embedding_size=sum(num_classes.values()),
                mean=CIFAR10_MEAN,
                std=CIFAR10_STD,
            )
        ).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    num_train = load_manifest(Path(config.data.probed_dir)).num_samples
    num_steps = JUDGE_EPOCHS * num_steps_per_epoch(num_train, JUDGE_BATCH)
    stream = open_stream(config.data, global_batch_size=JUDGE_BATCH, seed=JUDGE_SEED, end_step=num_steps)
    optimizer = torch.optim.AdamW(network.parameters(), weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=num_steps)
    with Progress("train the judge", total=num_steps) as progress:
        for batch in stream:
            base_BK, overlay_BK = torch.split(network(to_float(batch.inputs_a, CPU)), list(num_classes.values()), dim=1)
            loss = F.cross_entropy(base_BK, batch.labels[BASE]) + F.cross_entropy(overlay_BK, batch.labels[OVERLAY])
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            schedule.step()
            progress.advance(note=f"loss {loss.item():.3f}")
    return Judge(network.eval(), num_classes)


def probabilities_of(
    judge: Judge, test: Pictures, viewmaker: Viewmaker | None, *, view: int
) -> dict[LabelSpace, Tensor]:
    """Return the probability of the right class, (N,), for the test pictures themselves (None) or one view of each."""
    parts: list[dict[LabelSpace, Tensor]] = []
    with frozen(judge.network, viewmaker):
        for row_B in torch.split(torch.arange(len(test)), 128):
            batch = test.inputs(row_B)
            images_BCHW = to_float(batch.inputs, CPU).to(memory_format=torch.channels_last)
            if viewmaker is not None:
                images_BCHW = viewmaker(images_BCHW, measured_keys(test.index_N[row_B], view), batch.masks_BHW)
            parts.append(judge.probabilities(images_BCHW, batch.labels))
    return {space: torch.cat([part[space] for part in parts]) for space in SPACES}


def measured_keys(index_B: Tensor, view: int) -> DrawKeys:
    return DrawKeys(seed=MEASURED_SEED, epoch=0, index_B=index_B, view=view)


def measure(
    judge: Judge, test: Pictures, viewmaker: Viewmaker, setting: Setting, clean: Mapping[LabelSpace, Tensor]
) -> dict[str, Any]:
    """Measure what `NUM_VIEWS` views of every test picture that the judge reads without a view do to each feature."""
    if setting.dropout_rate is None:
        attacked_NV = torch.ones(len(test), NUM_VIEWS, dtype=torch.bool)
    else:
        rate, pairing = setting.dropout_rate, setting.dropout_pairing
        keys = [measured_keys(test.index_N, view) for view in range(NUM_VIEWS)]
        attacked_NV = torch.stack([attacked_views(key, rate=rate, pairing=pairing) for key in keys], dim=1)
    views = [probabilities_of(judge, test, viewmaker, view=view) for view in range(NUM_VIEWS)]
    p_NV = {space: torch.stack([view[space] for view in views], dim=1) for space in SPACES}
    is_read_N = {space: clean[space] > KEPT_ABOVE for space in SPACES}
    both_N = is_read_N["base"] & is_read_N["overlay"]
    overlay_gone_NV = p_NV["overlay"][both_N] < DESTROYED_BELOW
    base_in_those = p_NV["base"][both_N][overlay_gone_NV]
    return {
        **{space: fate(p_NV[space][is_read_N[space]], attacked_NV[is_read_N[space]]) for space in SPACES},
        "base_kept_where_overlay_destroyed": _mean(base_in_those > KEPT_ABOVE),
    }


def fate(p_NV: Tensor, attacked_NV: Tensor) -> dict[str, Any]:
    """Return how often views destroy one feature, from probabilities of its class in views of pictures that show it.

    `interval` is Wilson's (1927) at 95 %. Views of one picture may be alike, so it counts them as fewer views.
    `between_pictures` is the share of the variance that lies between pictures (the intraclass correlation). It is 0 if
    every picture loses the feature equally often, and 1 if always the same pictures do.
    """
    destroyed_NV = (p_NV < DESTROYED_BELOW).double()
    num_pictures, num_views = destroyed_NV.shape
    share = destroyed_NV.mean().item()
    within = destroyed_NV.var(1).mean().item()
    between = destroyed_NV.mean(1).var().item() - within / num_views
    correlation = between / (between + within) if between + within > 0 else 0.0
    num_effective = destroyed_NV.numel() / (1 + (num_views - 1) * max(correlation, 0.0))
    return {
        "num_pictures": num_pictures,
        "attacked": rounded(attacked_NV.double().mean().item()),
        "destroyed": rounded(share),
        "interval": [rounded(bound) for bound in wilson(share, num_effective)],
        "kept": rounded((p_NV > KEPT_ABOVE).double().mean().item()),
        "destroyed_of_attacked": _mean(destroyed_NV[attacked_NV]),
        "destroyed_of_others": _mean(destroyed_NV[~attacked_NV]),
        "between_pictures": rounded(correlation),
    }


def wilson(share: float, num: float, *, z: float = 1.96) -> tuple[float, float]:
    """Return the interval of Wilson (1927) of a share of `num` draws."""
    centre = (share + z**2 / (2 * num)) / (1 + z**2 / num)
    half = z / (1 + z**2 / num) * math.sqrt(share * (1 - share) / num + z**2 / (4 * num**2))
    return max(centre - half, 0.0), min(centre + half, 1.0)


def _mean(values: Tensor) -> float | None:
    return rounded(values.double().mean().item()) if values.numel() else None


def line_through(knobs: Sequence[float], shares: Sequence[float]) -> dict[str, float]:
    """Fit a line by least squares."""
    line = linregress(knobs, shares)
    return {
        "slope": rounded(line.slope),
        "intercept": rounded(line.intercept),
        "r_squared": rounded(line.rvalue**2),
    }


def run_config(setting: Setting, *, seed: int, num_epochs: int, directories: Mapping[str, str]) -> RunConfig:
    """Return `demo:viewmaker` with an encoder of half its width."""
    recipe = demo.viewmaker()
    return changed(
        recipe,
        name=f"budget {setting.budget:g}, rate {setting.dropout_rate}",
        seed=seed,
        data=recipe.data.model_copy(update=directories),
        views=setting.views,
        encoder=ResNetConfig(kind="resnet10", width=8, batch_norm="local"),
        num_epochs=num_epochs,
        tracking={"wandb": "disabled"},
    )


def settings(budget: float, *, with_budgets: bool) -> list[Setting]:
    without_rate = [Setting(other) for other in BUDGETS if other != budget] if with_budgets else []
    return [*(Setting(budget, rate) for rate in RATES), *without_rate]


def without_training(setting: Setting) -> list[Setting]:
    """Return the further settings at which the viewmaker of a setting is measured without new training."""
    if setting.dropout_rate == 1:
        return [dataclasses.replace(setting, trained="not at all")]
    if setting.dropout_rate != HELD_RATE:
        return []
    held = dataclasses.replace(setting, trained="at another rate")
    at_rates = [dataclasses.replace(held, dropout_rate=rate) for rate in RATES if rate != HELD_RATE]
    return [*at_rates, dataclasses.replace(held, dropout_pairing="exclusive")]


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Return a table for the terminal: one line for each run, shares in percent."""
    lines = [
        f"{'':<35}{'overlay destroyed':^30}{'base destroyed':^30}{'base kept where':>16}",
        f"{'budget  rate':<28}{'seed':>6} "
        + f"{'%  (95 %)':>18}{'of att.':>8}{'betw.':>6}" * 2
        + f"{'overlay gone':>14}",
    ]
    for result in results:
        setting, line = result["setting"], ""
        for space in ("overlay", "base"):
            found = result[space]
            low, high = (100 * bound for bound in found["interval"])
            line += f"{100 * found['destroyed']:8.1f} ({low:.1f}-{high:.1f})".rjust(20)
            line += f"{100 * found['destroyed_of_attacked']:7.1f}{found['between_pictures']:6.2f}"
        kept = result["base_kept_where_overlay_destroyed"]
        rate = "none" if setting["dropout_rate"] is None else f"{setting['dropout_rate']:g}"
        rate += " exclusive" if setting["dropout_pairing"] == "exclusive" else ""
        rate += {"not at all": " untrained", "at another rate": " held"}.get(setting["trained"], "")
        line += f"{'-' if kept is None else f'{100 * kept:.1f}':>10}"
        lines.append(f"{setting['budget']:<8g}{rate:<20}{result['seed']:>6} {line}")
    return "\n".join(lines)


def against_rate(results: Sequence[Mapping[str, Any]], trained: str) -> list[Mapping[str, Any]]:
    """Return the results with a dropout rate and independent pairs, of viewmakers trained in that way."""
    return [
        result
        for result in results
        if (setting := result["setting"])["dropout_rate"] is not None
        and setting["dropout_pairing"] == "independent"
        and setting["trained"] in {trained, "at this setting" if setting["dropout_rate"] == HELD_RATE else trained}
    ]


def fits(results: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Fit the destroyed share of each feature against `dropout_rate`, over all seeds.

    The groups are viewmakers trained at each rate, those of them up to a rate of one half, and the held one.
    """
    at_each = against_rate(results, "at this setting")
    groups = {
        "trained at each rate": at_each,
        "trained at each rate up to 0.5": [one for one in at_each if one["setting"]["dropout_rate"] <= 0.5],
        "held": against_rate(results, "at another rate"),
    }
    return {
        f"{space}, {title}": line_through(
            [one["setting"]["dropout_rate"] for one in group], [one[space]["destroyed"] for one in group]
        )
        for title, group in groups.items()
        for space in SPACES
    }


@contextmanager
def data_directories(train_dir: str | None, test_dir: str | None) -> Iterator[dict[str, str]]:
    """Yield the given directories, or build drawn pictures with handwritten digits in a temporary folder."""
    if (train_dir is None) != (test_dir is None):
        raise UserError("give both --train-dir and --test-dir, or neither")
    if train_dir is not None and test_dir is not None:
        yield {"train_dir": train_dir, "test_dir": test_dir}
        return
    with tempfile.TemporaryDirectory(prefix="dropout_rate-") as name:
        paths = {split: Path(name) / split for split in ("train", "test")}
        for split, limit in {"train": 5_000, "test": 2_000}.items():
            build_dataset("procedural_digits", paths[split], split=split, overlay="online", limit=limit)
        yield {f"{split}_dir": str(path) for split, path in paths.items()}


def run_all(args: argparse.Namespace, directories: Mapping[str, str], run_dirs: Path) -> Iterator[dict[str, Any]]:
    """Yield the accuracy of the judge, then one result for each run, and print the results as they come."""
    test = read_pictures(directories["test_dir"])
    first = run_config(Setting(args.budget), seed=0, num_epochs=args.epochs, directories=directories)
    judge = train_judge(first, test)
    clean = probabilities_of(judge, test, None, view=0)
    for space, p_N in clean.items():
        if (p_N > KEPT_ABOVE).sum() < MIN_PICTURES:
            raise UserError(
                f"the judge reads the {space} class of fewer than {MIN_PICTURES} test pictures; give --train-dir a "
                "larger set of pictures with both labels"
            )
    yield {
        "judge": {
            space: {
                "read_above_0.9": rounded((p_N > KEPT_ABOVE).double().mean().item()),
                "destroyed_without_a_view": rounded((p_N < DESTROYED_BELOW).double().mean().item()),
            }
            for space, p_N in clean.items()
        }
    }
    for seed in args.seeds:
        for setting in settings(args.budget, with_budgets=args.with_budgets and seed == args.seeds[0]):
            config = run_config(setting, seed=seed, num_epochs=args.epochs, directories=directories)
            start = time.process_time()
            run_dir = RunDir(run_dirs / f"{seed}-{setting.budget}-{setting.dropout_rate}")
            train(config, run_dir, device=CPU, command="benchmarks.dropout_rate")
            seconds = time.process_time() - start
            for measured in (setting, *without_training(setting)):
                modules = load_modules(run_dir, step=0 if measured.trained == "not at all" else None)
                assert modules.viewmaker is not None
                viewmaker = Viewmaker(measured.views, image_channels=3)
                viewmaker.load_state_dict(modules.viewmaker.state_dict())
                viewmaker.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
                result = {
                    "setting": dataclasses.asdict(measured),
                    "seed": seed,
                    "training_cpu_seconds": rounded(seconds) if measured is setting else None,
                    **measure(judge, test, viewmaker, measured, clean),
                }
                print(table([result]).splitlines()[-1], flush=True)
                yield result


def draw_figure(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the destroyed share of each feature against the rate and against the budget."""
    trained = [one for one in results if one["setting"]["trained"] == "at this setting"]
    by_budget = [one for one in trained if one["setting"]["dropout_rate"] in {None, 1}]
    held = against_rate(results, "at another rate")
    panels = (
        ("dropout_rate", against_rate(results, "at this setting"), "dropout_rate; trained at each"),
        ("dropout_rate", held, f"dropout_rate; one viewmaker, trained at {HELD_RATE:g}"),
        ("budget", by_budget, "budget; no dropout_rate"),
    )
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    axes = figure.subplots(1, 3, sharey=True)
    for axis, (knob, shown, title) in zip(axes, panels, strict=True):
        for space, marker in (("overlay", "o"), ("base", "s")):
            x = [result["setting"][knob] for result in shown]
            y = np.array([result[space]["destroyed"] for result in shown])
            bounds = np.array([result[space]["interval"] for result in shown])
            error = np.clip(np.stack([y - bounds[:, 0], bounds[:, 1] - y]), 0, None)
            axis.errorbar(x, y, yerr=error, fmt=marker, capsize=2, label=space, fillstyle="none")
        axis.set_xlabel(title)
        axis.set_ylim(-0.02, 1.02)
    for axis in axes[:2]:
        axis.plot([0, 1], [0, 1], color="grey", linewidth=0.8, label="upper bound")
    axes[0].set_ylabel("share of views in which it is destroyed")
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how often a viewmaker destroys a feature.")
    parser.add_argument("--train-dir", metavar="DIR", help="pictures with both labels, drawn online")
    parser.add_argument("--test-dir", metavar="DIR")
    parser.add_argument("--epochs", type=int, default=3, metavar="N", help="epochs of each run")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0], metavar="S", help="seeds; --with-budgets uses the first only"
    )
    parser.add_argument("--budget", type=float, default=0.4, metavar="B", help="budget of the runs with a dropout_rate")
    parser.add_argument("--with-budgets", action="store_true", help="add runs of other budgets without a dropout_rate")
    parser.add_argument("--out", type=Path, metavar="JSON")
    parser.add_argument("--figure", type=Path, metavar="PNG")
    args = parser.parse_args()
    before, start = on_one_core(packages=PACKAGES), time.process_time()
    with data_directories(args.train_dir, args.test_dir) as directories, tempfile.TemporaryDirectory() as run_dirs:
        judge, *results = run_all(args, directories, Path(run_dirs))
    lines = fits(results)
    print(f"\n{json.dumps(judge)}")
    print(table(results))
    for title, line in lines.items():
        print(f"{title}: destroyed = {line['slope']:.3f} rate + {line['intercept']:.3f}, R^2 = {line['r_squared']:.4f}")
    measured = {
        **before,
        "cpu_seconds": rounded(time.process_time() - start),
        "epochs": args.epochs,
        "views_of_a_picture": NUM_VIEWS,
        **judge,
        "fits_against_dropout_rate": lines,
        "results": results,
    }
    save(args.out, measured)
    if args.figure is not None:
        draw_figure(results, args.figure)


if __name__ == "__main__":
    run_command(main)
