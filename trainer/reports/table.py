"""The tidy table of a report: one row for each accuracy of each run. Every number that a page shows comes from it.

`measure` makes the rows from runs. `write_csv` writes them, and `read_csv` reads the same rows back.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from data_pipeline.core.errors import UserError
from data_pipeline.core.schema import as_typed, value_at
from data_pipeline.core.validation import KIND, describe
from trainer.probes.features import LabelSpace
from trainer.probes.linear import ProbeConfig
from trainer.probes.result import ProbeResult, unpack_right
from trainer.provenance import RECORDED_NUM_SAMPLES, RECORDED_NUM_TEST_SAMPLES
from trainer.reports.config_identity import config_identity, identity_settings
from trainer.reports.paired import Reading
from trainer.reports.runs import Run, Scored, name_of_data, protocol_of

logger = logging.getLogger(__name__)

FEATURES, PIXELS = "features", "pixels"
BALANCED = "linear, balanced"
_FACTOR: Final = "factor."  # begins the name of a column with a factor
_PLAIN: Final = {"num_epochs", "views", "batch_norm"}  # settings that the description of a protocol always gives
_FITTED_ON: Final = {"policy": "views of the run's own policy", "none": "samples without views"}


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One accuracy of one run, a row of the table.

    encoder: the name of the configuration; runs that differ only in their seed share it.
    factors: the levels of the run in the factors of its study, the settings of its sweep, or the settings that differ.
    readout: "linear" or "knn" (probes), "linear, worst group", "linear, balanced" (the mean over classes, if they are
        uneven; no sample is right or wrong), or "online_ridge" or "online_knn" (during training).
    reads: what the probe reads: "features", "embedding" or "pixels".
    protocol: the other settings of the probe in words. Accuracies of two protocols are never compared.
    step: of the checkpoint; 0 is the untrained encoder.
    num_steps: the last step of the training; None if it has not ended.
    num_samples: the test samples, of which `num_right` are right.
    chance, majority: one over the number of classes, and the share of the commonest class; None for online probes.
    num_train: the samples on which the readout was fitted.
    group: the classes of the worst group.
    data: the datasets by their hashes. Accuracies on different data are never compared.
    initial: the untrained encoder by a hash of its settings; encoders with one hash start alike.
    commit, hardware: of the first start of the training.
    right_samples: which test samples are right, see `unpack_right` of trainer.probes.result; empty if it is not known.
    num_neighbors: the k of kNN; None for other readouts, and in tables from before it was recorded.
    """

    run: str
    encoder: str
    seed: int
    factors: Mapping[str, str]
    label: LabelSpace
    title: str = ""
    readout: str
    reads: str
    protocol: str
    step: int
    num_steps: int | None = None
    value: float
    num_right: int
    num_samples: int
    chance: float | None = None
    majority: float | None = None
    num_train: int | None = None
    group: str = ""
    dataset: str
    data: str
    initial: str = ""
    commit: str = ""
    hardware: str = ""
    right_samples: str = field(default="", repr=False)
    num_neighbors: int | None = None

    @property
    def reading(self) -> Reading:
        """The accuracy, with its single samples if they are known and agree with it."""
        right_N = unpack_right(self.right_samples, num_test=self.num_samples) if self.right_samples else None
        if right_N is not None and int(right_N.sum()) != self.num_right:
            right_N = None
        return Reading(self.value, self.num_samples, right_N)

    @property
    def comparable(self) -> tuple[str, str, str]:
        """What two accuracies must share to be compared."""
        return self.protocol, self.reads, self.data

    @property
    def is_final(self) -> bool:
        """Whether the checkpoint is the last one of a training that has ended."""
        return self.step > 0 and self.step == self.num_steps


_ROWS: Final = TypeAdapter(Measurement)


def without_copies(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """Return the runs of which each seed counts once, and sentences on those that are left out.

    Of runs with the same configuration, data and seed, such as copies, one counts: the one probed at the latest step.
    """
    by_place: dict[tuple[str, str, int], list[Run]] = {}
    for run in runs:
        by_place.setdefault((config_identity(run.config), data_of(run), run.config.seed), []).append(run)
    counted, problems = [], []
    for of_place in by_place.values():
        steps = [max((result.checkpoint_step for result in run.results), default=-1) for run in of_place]
        first = of_place[steps.index(max(steps))]
        counted.append(first)
        problems += [
            f"Left out: {run.path} has the configuration, the data and the seed of {first.path}; a seed counts once."
            for run in of_place
            if run is not first
        ]
    return counted, problems


def measure(runs: Sequence[Run], scored: Scored | None = None) -> list[Measurement]:
    """Return the rows of all runs that have probe results or online probes, and of the `scored` encoders."""
    names, factors = encoder_names(runs), _factors(runs)
    rows: list[Measurement] = []
    for run in runs:
        shared: dict[str, Any] = {
            "run": run.name,
            "encoder": names[run.name],
            "seed": run.config.seed,
            "factors": factors[run.name],
            "num_steps": run.finished_step,
            "dataset": run.data_name,
            "data": data_of(run),
            **_origin(run.provenance),
        }
        rows += [*_probed(run.results, shared, run), *_online(run, shared)]
    for path, results in (scored or {}).items():
        first, encoder = results[0], results[0].scored
        assert encoder is not None
        shared = {
            "run": str(path),
            "encoder": encoder.name,
            "seed": encoder.seed,
            "factors": encoder.factors,
            "num_steps": max(1, first.checkpoint_step),
            "dataset": name_of_data(encoder.train_dir),
            "data": " ".join(sha256[:12] for sha256 in first.data),
            **_origin(encoder.origin),
        }
        rows += _probed(results, shared, None)
    return rows


def _origin(facts: Mapping[str, Any]) -> dict[str, str]:
    hardware = str(facts.get("gpu") or facts.get("cpu") or "")
    return {"commit": str(facts.get("git_commit") or "")[:12], "hardware": hardware}


def encoder_names(runs: Sequence[Run]) -> dict[str, str]:
    """Return the name of the configuration of each run by the name of the run.

    It is the name in the configs, or those of the runs if another configuration has the same name.
    """
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((config_identity(run.config), data_of(run)), []).append(run)
    titles = [" / ".join(dict.fromkeys(run.config.name for run in group)) for group in groups.values()]
    count = Counter(titles)
    return {
        run.name: title if count[title] == 1 else ", ".join(one.name for one in group)
        for title, group in zip(titles, groups.values(), strict=True)
        for run in group
    }


def data_of(run: Run) -> str:
    """Return the hashes of the train set and the test set of the probes, and those of other sets of the training."""
    facts = run.provenance
    results: list[Any] = [] if run.config.data.mixture is not None else [vars(result) for result in run.results[:1]]
    for source in [*results, facts]:
        hashes = [source.get("train_manifest_sha256"), source.get("test_manifest_sha256")]
        if all(hashes):
            break
    else:
        hashes = [" ".join(run.config.data.train_locations.values()), run.config.data.test_dir]
    text = " ".join(str(one)[:12] if len(str(one)) == 64 else str(one) for one in hashes)
    more = "+".join(sha256[:12] for sha256 in run.trained_on) if run.has_other_train_set else ""
    return f"{text} trained on {more}" if more else text


def describe_protocol(config: ProbeConfig) -> str:
    """Return the settings of a probe in words, without what it reads.

    Examples:
        >>> describe_protocol(ProbeConfig(views="none", momentum=0.5))
        '100 epochs on samples without views, batch norm in eval mode, momentum 0.5'
    """
    protocol, usual = protocol_of(config), dict(ProbeConfig().protocol)
    epochs = f"{protocol.num_epochs} epoch{'s' if protocol.num_epochs > 1 else ''}"
    parts = [f"{epochs} on {_FITTED_ON[protocol.views]}, batch norm in {protocol.batch_norm} mode"]
    for name, value in protocol:
        if name not in _PLAIN | {"seed", "reads"} and not name.startswith("online") and value != usual[name]:
            shown = " and ".join(map(str, value)) if isinstance(value, tuple) else value
            parts.append(f"{name.replace('_', ' ')} {shown}")
    return ", ".join(parts)


def write_csv(rows: Iterable[Measurement]) -> str:
    """Return the table as CSV. Factors have the prefix "factor."; a missing number is an empty cell."""
    rows = list(rows)
    names = list(dict.fromkeys(name for row in rows for name in row.factors))
    columns = [one.name for one in fields(Measurement)]
    at = columns.index("factors")
    head = [*columns[:at], *(_FACTOR + name for name in names), *columns[at + 1 :]]
    file = io.StringIO()
    writer = csv.DictWriter(file, head, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        values = {name: getattr(row, name) for name in columns if name != "factors"}
        writer.writerow(values | {_FACTOR + name: level for name, level in row.factors.items()})
    return file.getvalue()


def read_csv(path: Path) -> list[Measurement]:
    """Read a table that `write_csv` wrote, also as .csv.gz. Raises `UserError` if the file is none."""
    content = path.read_bytes()
    text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
    lines = list(csv.DictReader(io.StringIO(text, newline="")))
    try:
        return [_row(line) for line in lines]
    except ValidationError as error:
        reason = describe(error)
        raise UserError(f"{path} is no table of `python -m trainer.report --csv` ({reason}); write it again") from None


def _row(line: Mapping[str, str]) -> Measurement:
    factors = {name.removeprefix(_FACTOR): text for name, text in line.items() if name.startswith(_FACTOR) and text}
    return _ROWS.validate_python({**{name: text for name, text in line.items() if text}, "factors": factors})


def _factors(runs: Sequence[Run]) -> dict[str, dict[str, str]]:
    """Return the factors of each run by its name; without a study or a sweep, the settings that differ."""
    if any(run.config.tracking.factors for run in runs):
        return {run.name: dict(run.config.tracking.factors) for run in runs}
    if axes := list(dict.fromkeys(axis for run in runs for axis in run.config.tracking.axes if axis != "seed")):
        return {run.name: {axis: as_typed(value_at(run.config, axis)) for axis in axes} for run in runs}
    flat = {run.name: identity_settings(run.config) for run in runs}
    keys = dict.fromkeys(key for settings in flat.values() for key in settings)
    differing = [key for key in keys if len({as_typed(settings.get(key)) for settings in flat.values()}) > 1]
    kinds = tuple(key.removesuffix(KIND) for key in differing if key.endswith(f".{KIND}"))
    differing = [key for key in differing if key.endswith(f".{KIND}") or not key.startswith(kinds)]
    return {name: {key: as_typed(one[key]) for key in differing if key in one} for name, one in flat.items()}


def _probed(results: Sequence[ProbeResult], shared: Mapping[str, Any], run: Run | None) -> Iterator[Measurement]:
    classes = {result.label: result.class_names for result in results}
    for result in results:
        shared_by_result = dict(shared) | {
            "label": result.label,
            "title": result.title or "",
            "reads": result.probe_config.reads,
            "protocol": describe_protocol(result.probe_config),
            "step": result.checkpoint_step,
            "chance": result.chance,
            "majority": result.majority_share,
            "num_train": result.num_train,
            "initial": shared["encoder"] if run is None else _initial(run, result),
        }
        for readout, value in (("linear", result.linear.accuracy), ("knn", result.knn.accuracy)):
            yield Measurement(
                **shared_by_result,
                readout=readout,
                value=value,
                num_right=round(value * result.num_test),
                num_samples=result.num_test,
                group="",
                right_samples=result.right_samples.get(readout, ""),
                num_neighbors=result.knn.num_neighbors if readout == "knn" else None,
            )
        if (balanced := result.balanced_accuracy("linear")) is not None:
            yield Measurement(
                **shared_by_result, readout=BALANCED, value=balanced, num_right=0, num_samples=result.num_test
            )
        worst = [(one, groups) for groups in result.groups if (one := groups.worst("linear")) is not None]
        if worst:
            group, groups = min(worst, key=lambda found: found[0].accuracy)
            yield Measurement(
                **shared_by_result,
                readout="linear, worst group",
                value=group.accuracy,
                num_right=group.num_right,
                num_samples=group.num_test,
                group=groups.name(group, classes),
            )


def _online(run: Run, shared: Mapping[str, Any]) -> Iterator[Measurement]:
    probe, results = run.config.probe, {result.label: result for result in run.results}
    sizes = [run.provenance.get(name) for name in (RECORDED_NUM_SAMPLES, RECORDED_NUM_TEST_SAMPLES)]
    num_train = min(probe.online_num_train, sizes[0]) if sizes[0] else None
    for name, values in (run.logged or {}).items():
        _, label, method = (*name.split("/"), "", "")[:3]
        if method not in ("knn", "ridge"):
            continue
        result = results.get(label)
        num_test = _online_num_test(probe.online_num_test, sizes[1], None if result is None else result.num_test)
        for step, value in values.items():
            yield Measurement(
                **shared,
                label=label,
                title="" if result is None else result.title or "",
                readout=f"online_{method}",
                reads=FEATURES,
                protocol="online",
                step=step,
                value=float(value),
                num_right=round(value * num_test),
                num_samples=num_test,
                chance=None,
                majority=None,
                num_train=num_train,
                group="",
                initial="",
            )


def _online_num_test(most: int, num_test: int | None, num_labelled: int | None) -> int:
    """Return the number of test samples with a label that the online probe reads: their share of the drawn ones."""
    if not num_test:
        return most if num_labelled is None else min(most, num_labelled)
    drawn = min(most, num_test)
    return drawn if num_labelled is None else max(1, round(drawn * min(1.0, num_labelled / num_test)))


def _initial(run: Run, result: ProbeResult) -> str:
    """Return a hash of what decides the result of the untrained encoder, beside its seed."""
    views = run.config.views.model_dump_json() if result.probe_config.views == "policy" else ""
    return hashlib.sha256(
        (run.config.encoder.model_dump_json(exclude={"weights", "frozen_stages"}) + views).encode()
    ).hexdigest()[:8]
