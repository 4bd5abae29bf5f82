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
    num_draws: how many draws of the overlays of the test set are tested.
    changes: to the probe of the config. The names of the result files then say them.
    untrained: probe the untrained encoder too, before the others.
    pixels: probe the raw pixels too, before the others. Their results are those of step 0.
    allow_shared: replaces the share in the config if it is given.
    """

    steps: int | Literal["all"] | None = None
    labels: Sequence[LabelSpace] | None = None
    num_draws: int = 1
    changes: Mapping[str, Any] = field(default_factory=dict)
    untrained: bool = False
    pixels: bool = False
    allow_shared: float | None = None

    def changed(self, own: ProbeConfig, *, reads_pixels: bool = False) -> ProbeConfig:
        """Return the probe of a run's config with the changes. Raises `UserError` for a value that it cannot have."""
        return ProbeConfig.parse(own.model_dump() | self._changes(reads_pixels), where="the probe")

    def suffix(self, own: ProbeConfig, *, reads_pixels: bool = False) -> str:
        """Return the part of file names that says how the probe differs from the one of the run's config."""
        changes = self._changes(reads_pixels)
        changed = {name: value for name, value in changes.items() if value != getattr(own, name)}
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

    def _changes(self, reads_pixels: bool) -> dict[str, Any]:
        return dict(self.changes) | ({"reads": "pixels"} if reads_pixels else {})
