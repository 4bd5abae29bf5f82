"""Group probe results by protocol. Invariant: results of two protocols never share a column or a sentence.

A protocol is all settings of a probe except its seed. Most reports have only the protocol of the runs' configs. The
options `--views`, `--batch-norm`, `--epochs`, `--reads` and `--precision` of `python -m trainer.probe` make others. A
probe of pixels is a floor of the protocols that differ from its own in `reads` alone, and so no protocol of its own
beside them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from data_pipeline.core.sample import BASE, OVERLAY
from trainer.probes.features import LabelSpace
from trainer.probes.linear import ProbeConfig
from trainer.reports.runs import Arm, Run, labels_of, runs_of_arms

_PLAIN = {"num_epochs", "views", "batch_norm"}  # settings that the description of a protocol always gives
_OPTIONS = {
    "views": "--views",
    "batch_norm": "--batch-norm",
    "num_epochs": "--epochs",
    "reads": "--reads",
    "precision": "--precision",
}


@dataclass(frozen=True)
class ProtocolArms:
    """The arms of a report with their results of one protocol.

    `title` names the protocol. It is empty if all results of the report have the protocol of the configs.
    """

    protocol: ProbeConfig
    title: str
    arms: tuple[Arm, ...]


def by_protocol(arms: Sequence[Arm]) -> list[ProtocolArms]:
    """Return the arms for each protocol with results, at least for one. The protocol of most runs comes first."""
    protocols = protocols_of(runs_of_arms(arms))
    own = all(run.own_protocol == protocols[0] for run in runs_of_arms(arms))
    is_plain = len(protocols) == 1 and own
    return [
        ProtocolArms(
            protocol,
            "" if is_plain else f"probe of {describe_protocol(protocol)}",
            tuple(arm.under(protocol) for arm in arms),
        )
        for protocol in protocols
    ]


def protocols_of(runs: Sequence[Run]) -> list[ProbeConfig]:
    """Return the protocols with results, at least one: first those of most trained runs, then those of more configs."""

    def rank(protocol: ProbeConfig) -> tuple[int, int, str]:
        trained = sum(run.under(protocol).final_probe(space) is not None for run in runs for space in labels_of([run]))
        own = sum(run.own_protocol == protocol for run in runs)
        return -trained, -own, protocol.model_dump_json()

    every = {protocol for run in runs for protocol in run.readouts}
    of_encoders = {protocol for protocol in every if protocol.reads != "pixels"}
    found = of_encoders | (every - {of_pixels(protocol) for protocol in of_encoders})
    return sorted(found, key=rank) or [runs[0].own_protocol]


def of_pixels(protocol: ProbeConfig) -> ProbeConfig:
    """Return the protocol that fits the same probe on pixels, which need no encoder."""
    return protocol.model_copy(update={"reads": "pixels"})


def describe_protocol(protocol: ProbeConfig) -> str:
    """Describe a protocol in words that no other protocol has.

    Examples:
        >>> describe_protocol(ProbeConfig(views="none", momentum=0.5))
        '100 epochs on samples without views, batch norm in eval mode, momentum 0.5'
    """
    epochs = f"{protocol.num_epochs} epoch{'s' if protocol.num_epochs > 1 else ''}"
    parts = [f"{epochs} on {FITTED_ON[protocol.views]}, batch norm in {protocol.batch_norm} mode"]
    usual = dict(ProbeConfig().protocol)
    for name, value in protocol.protocol:
        if name not in _PLAIN | {"seed"} and "online" not in name and value != usual[name]:
            shown = " and ".join(map(str, value)) if isinstance(value, tuple) else value
            parts.append(f"{name.replace('_', ' ')} {shown}")
    return ", ".join(parts)


FITTED_ON = {"policy": "views of the run's own policy", "none": "samples without views"}


def probe_command(run: Run, protocol: ProbeConfig, *more: str) -> str:
    """Return the command that probes a run with a protocol, as far as its options can express the protocol."""
    own = protocol_values(run.own_protocol)
    wanted = protocol_values(protocol)
    options = [f"{_OPTIONS[name]} {value}" for name, value in wanted.items() if own[name] != value]
    return " ".join(["python -m trainer.probe", str(run.path), *more, *options])


def protocol_values(protocol: ProbeConfig) -> dict[str, str | int]:
    """Return the settings that `python -m trainer.probe` has options for."""
    return {name: getattr(protocol, name) for name in _OPTIONS}


def label_titles(arms: Sequence[Arm]) -> dict[LabelSpace, str]:
    """Return the title of each label, such as "picture" and "digit", as the manifest had it when the run was probed.

    A label whose results have no title, several, or that of another label is called by its name, such as "base label".
    There are always titles for `base` and `overlay`.
    """
    found: dict[LabelSpace, set[str]] = {space: set() for space in (BASE, OVERLAY, *labels_of(runs_of_arms(arms)))}
    for run in runs_of_arms(arms):
        for result in (one for probes in run.readouts.values() for step in probes.values() for one in step.values()):
            if result.title not in {None, "", BASE, OVERLAY}:
                found[result.label].add(str(result.title))
    titles: dict[LabelSpace, str] = {
        space: next(iter(of_space)) if len(of_space) == 1 else f"{space} label" for space, of_space in found.items()
    }
    shared = Counter(titles.values())
    return {space: title if shared[title] == 1 else f"{space} label" for space, title in titles.items()}
