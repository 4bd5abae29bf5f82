"""The form and the input of every analysis: a run at one checkpoint, and its samples.

Shapes: N samples, V views of each, D dimensions of a space, C pooled features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from data_pipeline.core.errors import UserError
from data_pipeline.core.progress import Progress
from data_pipeline.core.randomness import generator
from data_pipeline.core.schema import Schema
from trainer.config import RunConfig, read_run_config
from trainer.modules import TrainedModules
from trainer.pretrained import load_modules, warn_of_other_data
from trainer.probes.features import Pictures, encode, frozen, read_pictures, read_train
from trainer.probes.view_batches import view_batches
from trainer.run_dir import RunDir, write_atomically, write_json

CPU = torch.device("cpu")
Space = Literal["embedding", "pooled"]  # of vectors: the embedding, or the pooled features below the head
SPACES: tuple[Space, ...] = ("embedding", "pooled")


class RunResult(Schema):
    """The fields that the numbers of one checkpoint have in common. `seed` is that of all draws."""

    seed: int
    checkpoint_step: int
    test_manifest_sha256: str


@dataclass(frozen=True)
class LoadedRun:
    """A run at one checkpoint. Its parts are read when they are used.

    Raises `UserError` then if the run has no such checkpoint, or if data is missing.

    step: the checkpoint (None: the newest; 0: untrained).
    device: where the encoder computes.
    given_seed: of all draws (None: the seed of the run).
    """

    run_dir: RunDir
    step: int | None = None
    device: torch.device = CPU
    given_seed: int | None = None

    @cached_property
    def config(self) -> RunConfig:
        return read_run_config(self.run_dir)

    @property
    def seed(self) -> int:
        return self.config.seed if self.given_seed is None else self.given_seed

    @cached_property
    def modules(self) -> TrainedModules:
        """Return the modules of the checkpoint, on `device`, in eval mode."""
        return load_modules(self.run_dir, step=self.step).to(self.device)

    @cached_property
    def train(self) -> Pictures:
        pictures = read_train(self.config.data)
        warn_of_other_data(self.modules, "train", pictures.manifest)
        return pictures

    @cached_property
    def test(self) -> Pictures:
        pictures = self.read_test()
        warn_of_other_data(self.modules, "test", pictures.manifest)
        return pictures

    def read_test(self, *, pictures_for: str | None = None) -> Pictures:
        """Read the test samples, without the checkpoint.

        With `pictures_for`, the name of an analysis, raises `UserError` if they are sounds.
        """
        test = read_pictures(self.config.data.test_dir, read=self.config.data)
        if pictures_for is not None and test.are_sounds:
            raise UserError(
                f"{pictures_for} needs pictures, but the samples of {self.run_dir.path} are sounds; pass a run on "
                "pictures"
            )
        return test

    def choose_rows(self, samples: Sized, num: int) -> Tensor:
        """Draw rows of `num` samples without replacement, or of all if there are fewer; (num,) int64, ascending."""
        order = generator(self.seed, "samples of an analysis").permutation(len(samples))
        return torch.from_numpy(order[:num]).sort().values

    @property
    def facts(self) -> dict[str, Any]:
        """Return the fields of a `RunResult`."""
        return {
            "seed": self.seed,
            "checkpoint_step": self.modules.step,
            "test_manifest_sha256": self.test.manifest.sha256,
        }


def plain_vectors(loaded: LoadedRun, rows_N: Tensor) -> dict[Space, Tensor]:
    """Return the vectors (N, D) of test samples without views in every space."""
    encoder = loaded.modules.encoder
    with frozen(encoder):
        [pooled_NC] = encode(lambda x_BCHW: [encoder.pooled(x_BCHW)], loaded.test.images(rows_N), device=loaded.device)
        return {"embedding": encoder.head(pooled_NC), "pooled": pooled_NC}


def view_vectors(loaded: LoadedRun, pictures: Pictures, rows_N: Tensor, *, num_views: int) -> dict[Space, Tensor]:
    """Return the vectors (N, V, D) of `num_views` views of each sample in every space."""
    encoder, policy = loaded.modules.encoder, loaded.modules.view_policy
    by_view: dict[Space, list[Tensor]] = {space: [] for space in SPACES}
    with frozen(encoder), Progress("views encoded", total=num_views * len(rows_N)) as progress:
        for view in range(num_views):
            parts = []
            for batch in view_batches(policy, pictures, rows_N, seed=loaded.seed, view=view, device=loaded.device):
                parts.append(encoder.pooled(batch.views_BCHW))
                progress.advance(len(batch.views_BCHW))
            by_view["pooled"].append(torch.cat(parts))
            by_view["embedding"].append(encoder.head(by_view["pooled"][-1]))
    return {space: torch.stack(views, dim=1) for space, views in by_view.items()}


@dataclass(frozen=True)
class Analysis:
    """An analysis of a run, or of several runs together.

    name: of the files.
    settings: their class.
    measure: takes a `LoadedRun`, or a list of all runs if the analysis `compares_runs`, and the settings. Returns the
        numbers, a `Schema`, and a picture as PNG.
    in_name: the setting that becomes a part of the name if it is given.
    """

    name: str
    settings: type[Schema]
    measure: Callable[..., Any]
    compares_runs: bool = False
    in_name: str | None = None

    def analyze(self, runs: Sequence[LoadedRun], *, config: Schema, out: Path | None = None) -> list[Path]:
        """Write RUN_DIR/analysis/NAME.png and NAME.json of each run, and return their paths.

        `out` is the file of an analysis that writes a page in their place.
        Raises `UserError` if a checkpoint or data is missing, or if the analysis cannot measure these runs.
        """
        result, png = self.measure(runs if self.compares_runs else runs[0], config)
        value = None if self.in_name is None else getattr(config, self.in_name)
        name = self.name if value is None else f"{self.name}-{self.in_name}_{value}"
        paths = []
        for run in runs:
            png_path, json_path = (run.run_dir.analysis / f"{name}.{form}" for form in ("png", "json"))
            write_atomically(png_path, png)
            write_json(json_path, result.model_dump(mode="json"))  # last: the numbers are there only if the picture is
            paths += [png_path, json_path]
        return paths
