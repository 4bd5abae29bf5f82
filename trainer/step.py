"""One training step: two views of each sample, their embeddings, the objective, one step of each player.

A sample is a picture, or a waveform whose views are spectrograms: pictures of one channel.

The two views are encoded in two forwards, as published, so batch norm sees each view's batch by itself; or in one,
where the config says so: faster, and batch norm sees both.
Shape suffixes: B samples of this rank, C channels, H height, W width, D embedding size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from data_pipeline.audio.log_mel import MelConfig
from data_pipeline.counter_rng import DrawKeys
from data_pipeline.sample import Batch
from trainer.adversary import reverse_gradient
from trainer.config import RunConfig
from trainer.distributed.engine import Engine
from trainer.objectives import Objective, ObjectiveOutput, ViewPair
from trainer.objectives.health import embedding_health
from trainer.views import ViewPolicy
from trainer.views.expert_audio import clean_spectrogram
from trainer.views.health import view_health


@dataclass(frozen=True)
class InputPair:
    """What the two views are made from: pictures (B, C, H, W) in [0, 1], or waveforms (B, T). One tensor, unless the
    overlay is drawn for each view.
    """

    a: Tensor
    b: Tensor


@dataclass(frozen=True)
class Compared:
    """The objective's answer to two views: its loss with gradient, metrics, and the embeddings (B, D) it was given."""

    loss: Tensor
    metrics: dict[str, Tensor]
    z_a_BD: Tensor
    z_b_BD: Tensor


@dataclass(frozen=True)
class StepOutput:
    """What a step leaves for the log, all detached: metric tensors, and this rank's views with the inputs that the
    first were made from; `mel` says how inputs that are waveforms are seen. `views_b_BCHW` and `masks_BHW` are None
    where they are of other inputs than the first views, or absent.
    """

    metrics: dict[str, Tensor]
    inputs: Tensor
    mel: MelConfig | None
    views_a_BCHW: Tensor
    views_b_BCHW: Tensor | None
    masks_BHW: Tensor | None
    z_a_BD: Tensor
    z_b_BD: Tensor

    def read(self) -> dict[str, Tensor]:
        """The metrics, those of views and embeddings included; every rank asks for them at the same steps.

        Costs a little, so only logged steps ask.
        """
        images_BCHW = self.inputs if self.mel is None else clean_spectrogram(self.inputs, self.mel)
        health = view_health(
            self.views_a_BCHW, self.views_b_BCHW, images_BCHW, self.masks_BHW, bounded=self.mel is None
        )
        embeddings = embedding_health(self.z_a_BD, self.z_b_BD)
        return (
            self.metrics
            | {f"views/{name}": value for name, value in health.items()}
            | {f"embeddings/{name}": value for name, value in embeddings.items()}
        )


class TrainingStep:
    """Runs steps of one run; `engines` holds "encoder", and "viewmaker" where the views are learned.

    What the objective itself trains (a predictor) is under the engine "objective", and steps with the encoder.
    """

    def __init__(
        self, config: RunConfig, *, engines: Mapping[str, Engine], view_policy: ViewPolicy, objective: Objective
    ) -> None:
        self._config = config
        self._mel = config.data.mel
        self._encoder = engines["encoder"]
        self._learner = [engines[name] for name in ("encoder", "objective") if name in engines]
        self._objective: Engine | Objective = engines.get("objective", objective)
        self._viewmaker = engines.get("viewmaker")
        self._views: Engine | ViewPolicy = self._viewmaker if self._viewmaker is not None else view_policy
        self._memory_format = torch.channels_last if config.channels_last else torch.contiguous_format

    def __call__(self, batch: Batch, *, learning_rates: Mapping[str, float]) -> StepOutput:
        """One step on this rank's part of a global batch, already on the training device.

        `learning_rates` is by player. The loss in the metrics is this rank's; its mean over ranks is the global loss.
        """
        inputs = self._to_inputs(batch)
        adversary = self._config.adversary
        if adversary is None:
            return self._expert_step(batch, inputs, learning_rates)
        if adversary.freeze_step is not None and batch.step >= adversary.freeze_step:
            assert self._viewmaker is not None
            with self._viewmaker.frozen():
                return self._expert_step(batch, inputs, learning_rates)
        if adversary.update == "simultaneous":
            return self._simultaneous_step(batch, inputs, learning_rates)
        return self._alternating_step(batch, inputs, learning_rates)

    def _to_inputs(self, batch: Batch) -> InputPair:
        is_expert_image = self._viewmaker is None and self._mel is None  # whose views are float32
        dtype = torch.float32 if is_expert_image else self._config.parameter_dtype

        def to_input(stored: Tensor) -> Tensor:
            if self._mel is not None:
                return stored.to(dtype)
            return (stored.to(dtype) / 255).to(memory_format=self._memory_format)

        a = to_input(batch.inputs_a)
        return InputPair(a, a if batch.inputs_b is batch.inputs_a else to_input(batch.inputs_b))

    def _expert_step(self, batch: Batch, inputs: InputPair, learning_rates: Mapping[str, float]) -> StepOutput:
        views_a, views_b = self._two_views(batch, inputs, first=0)
        compared = self._compare(batch, views_a, views_b)
        self._encoder.backward(compared.loss)
        self._step_learner(learning_rates["encoder"])
        return self._output(batch, inputs, compared, views_a, views_b)

    def _simultaneous_step(self, batch: Batch, inputs: InputPair, learning_rates: Mapping[str, float]) -> StepOutput:
        """One forward and one backward for both players: the viewmaker gets the gradient of -weight * loss."""
        assert self._viewmaker is not None
        assert self._config.adversary is not None
        weight = self._config.adversary.weight
        views_a, views_b = self._two_views(batch, inputs, first=0)
        compared = self._compare(batch, reverse_gradient(views_a, weight), reverse_gradient(views_b, weight))
        self._encoder.backward(compared.loss)
        self._step_learner(learning_rates["encoder"])
        self._viewmaker.step(learning_rate=learning_rates["viewmaker"])
        compared.metrics["train/viewmaker_loss"] = -weight * compared.loss.detach()
        return self._output(batch, inputs, compared, views_a, views_b)

    def _alternating_step(self, batch: Batch, inputs: InputPair, learning_rates: Mapping[str, float]) -> StepOutput:
        """The published order: the encoder steps, then the viewmaker on new draws seen by the updated encoder."""
        assert self._viewmaker is not None
        assert self._config.adversary is not None
        with self._viewmaker.frozen():
            views_a, views_b = self._two_views(batch, inputs, first=0)
            compared = self._compare(batch, views_a, views_b)
            self._encoder.backward(compared.loss)
            self._step_learner(learning_rates["encoder"])
        with self._learner_frozen():
            for number in range(1, self._config.adversary.viewmaker_steps + 1):
                views_a, views_b = self._two_views(batch, inputs, first=2 * number)
                after = self._compare(batch, views_a, views_b, updates_state=False)
                viewmaker_loss = -self._config.adversary.weight * after.loss
                self._viewmaker.backward(viewmaker_loss)
                self._viewmaker.step(learning_rate=learning_rates["viewmaker"])
        compared.metrics["train/viewmaker_loss"] = viewmaker_loss.detach()
        return self._output(batch, inputs, compared, views_a, views_b)

    def _output(
        self, batch: Batch, inputs: InputPair, compared: Compared, views_a: Tensor, views_b: Tensor
    ) -> StepOutput:
        return StepOutput(
            metrics=compared.metrics,
            inputs=inputs.a,
            mel=self._mel,
            views_a_BCHW=views_a.detach(),
            views_b_BCHW=views_b.detach() if inputs.a is inputs.b else None,
            masks_BHW=batch.masks_BHW,
            z_a_BD=compared.z_a_BD.detach(),
            z_b_BD=compared.z_b_BD.detach(),
        )

    def _two_views(self, batch: Batch, inputs: InputPair, *, first: int) -> tuple[Tensor, Tensor]:
        """Views number `first` and `first + 1` of every sample."""
        a, b = (
            DrawKeys(seed=self._config.seed, epoch=batch.epoch, index_B=batch.index_B, view=view)
            for view in (first, first + 1)
        )
        # Only a network is worth autocast: the crop's products in bfloat16 would leave a picture fewer shades.
        with self._autocast(inputs.a.device) if self._viewmaker is not None else contextlib.nullcontext():
            return self._views(inputs.a, a, batch.masks_BHW), self._views(inputs.b, b, batch.masks_b_BHW)

    def _compare(self, batch: Batch, views_a: Tensor, views_b: Tensor, *, updates_state: bool = True) -> Compared:
        with self._autocast(views_a.device):
            if self._config.view_forwards == "two":
                z_a, z_b = self._encoder(views_a), self._encoder(views_b)
            else:
                z_a, z_b = self._encoder(torch.cat([views_a, views_b])).chunk(2)
            pair = ViewPair(views_a.detach(), views_b.detach(), batch.index_B, batch.step, updates_state)
            output: ObjectiveOutput = self._objective(z_a, z_b, pair)  # losses leave autocast, a key encoder does not
        metrics = {"train/loss": output.loss.detach()}
        metrics |= {f"train/{name}": value for name, value in output.metrics.items()}
        return Compared(output.loss, metrics, z_a, z_b)

    def _step_learner(self, learning_rate: float) -> None:
        for engine in self._learner:
            engine.step(learning_rate=learning_rate)

    @contextlib.contextmanager
    def _learner_frozen(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for engine in self._learner:
                stack.enter_context(engine.frozen())
            yield

    def _autocast(self, device: torch.device) -> AbstractContextManager[None]:
        return torch.autocast(device.type, dtype=torch.bfloat16, enabled=self._config.precision == "bfloat16")
