"""What `python -m trainer.probe` is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from trainer.probes.features import LabelSpace
from trainer.probes.linear import ProbeConfig


@dataclass(frozen=True)
class ProbeOptions:
    """What to probe of a run. The defaults are the newest checkpoint and the probe of the run's config.

    steps: the checkpoint, or "all"; None for the newest.
    labels: None for `probe.labels` of the config, or all labels of the data.
    changes: to the probe of the config. The names of the result files then say them.
    untrained: probe the untrained encoder too, before the others.
    """

    steps: int | Literal["all"] | None = None
    labels: Sequence[LabelSpace] | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    untrained: bool = False

    def changed(self, own: ProbeConfig) -> ProbeConfig:
        """Return the probe of a run's config with the changes. Raises `UserError` for a value that it cannot have."""
        return ProbeConfig.parse(own.model_dump() | dict(self.changes), where="the probe")

    def suffix(self, own: ProbeConfig) -> str:
        """Return the part of file names that says how the probe differs from the one of the run's config."""
        changed = {name: value for name, value in self.changes.items() if value != getattr(own, name)}
        return "".join(f"-{name}_{value}" for name, value in changed.items())

    def checkpoint_steps(self, at_all: Sequence[int | None], newest: int | None) -> list[int | None]:
        """Return the steps to probe, 0 for the untrained encoder.

        at_all: the steps of all checkpoints.
        newest: the step that None stands for; None leaves it open.
        """
        untrained: list[int | None] = [0] if self.untrained else []
        if self.steps == "all":
            return [*untrained, *at_all]
        return [*untrained, newest if self.steps is None else self.steps]
