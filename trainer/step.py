"""Take one training step: views of each sample, their embeddings, the objective, one step of each trained module.

A sample is a picture, or a waveform; the views of a waveform are spectrograms, which are pictures of one channel.

Both views are made together, as 2 B rows, which takes half as many operations. They are encoded such that batch norm
treats each view as a separate batch, as published in two forward passes (see `Encoder.forward`).

A view policy may have further views, which may be smaller (`BaseViewsConfig.num_further`). They are made one by one,
and encoded in a group of their own: views of one size pass the encoder together. The objective gets all embeddings.
The samples without a view are one more view of this group if the objective takes them.

Shapes: B samples of this rank, C channels, H height, W width, D embedding size.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from data_pipeline.audio.log_mel import MelConfig
from data_pipeline.core.batch import Batch
from data_pipeline.core.kinds import is_own
from data_pipeline.core.randomness import key_words
from trainer.adversary import AdversaryConfig, reverse_gradient
from trainer.config import RunConfig
from trainer.distributed.collectives import rank
from trainer.distributed.engines.engine import Engine
from trainer.liveness import stage
from trainer.memory import interleave
from trainer.models.activation_checkpointing import buffers_untouched
from trainer.models.late_pruning import set_pruned_step
from trainer.models.random_layers import has_random_layers, seeded
from trainer.modules import learned_part, memory_format
from trainer.objectives import Objective, ObjectiveOutput, ViewPair
from trainer.objectives.health import embedding_health
from trainer.optim.skipping import StateSnapshot, any_not_finite
from trainer.views import ViewPolicy
from trainer.views.expert_audio import clean_spectrogram
from trainer.views.health import view_health
from trainer.views.inputs import from_bytes
from trainer.views.viewmaker import Viewmaker


@dataclass(frozen=True)
class RecordedMoment:
    """The step and the epoch of a batch as 0-d int64 tensors, for a step that is recorded once and replayed later."""

    step: Tensor
    epoch: Tensor


@dataclass(frozen=True)
class BackwardPass:
    """One backward pass of a step: the views that it uses, and the weight of the loss for each module.

    Attributes:
        engine: an engine that learns from the loss.
        first_view: the number of the first view; the second view has the next number.
        loss_weight: the weight of the loss for the encoder, and for the viewmaker if `views_learn`.
        reversal: if given, the viewmaker learns from minus `reversal` times this loss.
        views_learn: whether the viewmaker learns.
        updates_state: whether the objective may change its state, as in `ViewPair`.
        moment: the step and epoch of a recorded step, in place of those of the batch.
    """

    engine: Engine
    first_view: int = 0
    loss_weight: float = 1.0
    reversal: float | None = None
    views_learn: bool = False
    updates_state: bool = True
    moment: RecordedMoment | None = None


@dataclass(frozen=True)
class StepOutput:
    """The result of a step for the log, all detached.

    Attributes:
        metrics: scalars of this rank's part of the batch.
        skipped: a bool scalar, equal on all ranks: whether a gradient was not finite, so that nothing was learned or
            changed. With alternating updates, this update and the later updates of the step were skipped.
        inputs: a function that returns the inputs of the two views: pictures (B, C, H, W) in [0, 1], or waveforms
            (B, T). Both are the same tensor, unless the overlay is drawn for each view.
        mel: the config of the spectrogram of waveforms; None for pictures.
        bounded: whether the views are pictures in [0, 1].
        views_a_BCHW, views_b_BCHW: this rank's views; the second is None if the two views have different inputs.
        masks_BHW: the masks of the first inputs; None if there are none.
        z_a_BD, z_b_BD: the embeddings of the views.
        viewmaker_change: if the viewmaker is part of a composition, or gets waveforms that were changed before, the
            pictures or spectrograms that it got, and its views of them, from which these views were made; otherwise
            None. Only those of the last call of the policy, which takes less memory: with micro batches of the last
            one, and of sounds on a CPU of the second view.
    """

    metrics: dict[str, Tensor]
    skipped: Tensor
    inputs: Callable[[], tuple[Tensor, Tensor]]
    mel: MelConfig | None
    bounded: bool
    views_a_BCHW: Tensor
    views_b_BCHW: Tensor | None
    masks_BHW: Tensor | None
    z_a_BD: Tensor
    z_b_BD: Tensor
    viewmaker_change: tuple[Tensor, Tensor] | None = None

    def read(self) -> dict[str, Tensor]:
        """Return the metrics, including metrics of views and embeddings. Every rank must call this at the same steps.

        They take some time to compute, so only logged steps do it.
        """
        inputs, _ = self.inputs()
        images_BCHW = inputs if self.mel is None else clean_spectrogram(inputs, self.mel)
        health = view_health(self.views_a_BCHW, self.views_b_BCHW, images_BCHW, self.masks_BHW, bounded=self.bounded)
        if self.viewmaker_change is not None:  # what the other policies change says nothing of the viewmaker
            given_BCHW, made_BCHW = self.viewmaker_change
            # Other policies, such as a random mask with rescale, may leave [0, 1] behind the viewmaker.
            health |= view_health(made_BCHW, None, given_BCHW, None, bounded=self.mel is None)
        embeddings = embedding_health(self.z_a_BD, self.z_b_BD)
        return (
            self.metrics
            | {f"views/{name}": value for name, value in health.items()}
            | {f"embeddings/{name}": value for name, value in embeddings.items()}
        )


class TrainingStep:
    """The training step of a run; `engines` holds "encoder", and "viewmaker" if the views are learned.

    If the objective has trained parameters (a predictor), its engine is "objective", which steps with the encoder.

    With `memory.micro_batches` above 1, the batch is first encoded in parts, without gradients. The objective computes
    the gradient of each embedding from all embeddings. Then each part is encoded again, and the gradient of its
    embeddings is passed on (Gao et al. 2021). Views are functions of their keys, so they are equal both times.
    The encoder's random layers, such as dropout, are seeded, so they also draw the same both times.
    """

    def __init__(
        self, config: RunConfig, *, engines: Mapping[str, Engine], view_policy: ViewPolicy, objective: Objective
    ) -> None:
        self._config = config
        self._mel = config.data.mel
        self._encoder = engines["encoder"]
        self._learner = {name: engines[name] for name in ("encoder", "objective") if name in engines}
        self._objective: Engine | Objective = engines.get("objective", objective)
        self._viewmaker = engines.get("viewmaker")
        self._views: Engine | ViewPolicy = self._viewmaker if self._viewmaker is not None else view_policy
        self._policy = view_policy
        self._learned_part = part = learned_part(view_policy)
        if isinstance(part, Viewmaker):
            part.keeps_change = part is not view_policy or part.config.waveform is not None
        num_further = config.views.num_further + config.objective.takes_samples
        self._group_sizes = (2, num_further) if num_further else (2,)
        self._memory_format = memory_format(self._encoder.module)
        # A function such as F.dropout in an encoder of the user's own is no layer that could be found.
        self._seeds_encoder = has_random_layers(self._encoder.module) or is_own(config.encoder)
        learned_views = [] if self._viewmaker is None else [self._viewmaker.module]
        self._snapshot = StateSnapshot([self._encoder.module, objective, *learned_views])
        device = next(self._encoder.module.parameters()).device
        self._not_skipped = torch.zeros((), dtype=torch.bool, device=device)  # until the optimizers step

    def __call__(self, batch: Batch, *, learning_rates: Mapping[str, float]) -> StepOutput:
        """Train on this rank's part of a global batch, which is on the training device.

        `learning_rates` holds the rate of each engine by name. The loss in the metrics is the loss of this rank; its
        mean over the ranks is the global loss.
        """
        return self.run(batch, learning_rates, viewmaker_is_frozen=self.viewmaker_is_frozen(batch))

    def viewmaker_is_frozen(self, batch: Batch) -> bool:
        """Return whether there is a viewmaker that does not learn from a batch."""
        if self._config.adversary is None:
            return False
        return not self._config.viewmaker_learns(step=batch.step, epoch=batch.epoch)

    def run(
        self,
        batch: Batch,
        learning_rates: Mapping[str, float | Tensor],
        *,
        viewmaker_is_frozen: bool,
        moment: RecordedMoment | None = None,
    ) -> StepOutput:
        """Train on a batch without a look at its step, so that the same kernels can be launched at another step.

        `moment` replaces the step and the epoch of the batch in all draws, and a learning rate may be a tensor.
        """
        adversary = self._config.adversary
        if adversary is None:
            result, skip = self._learner_step(batch, learning_rates, moment)
        elif viewmaker_is_frozen:
            assert self._viewmaker is not None
            with self._viewmaker.frozen():
                result, skip = self._learner_step(batch, learning_rates, moment)
        elif adversary.update == "simultaneous":
            result, skip = self._simultaneous_step(batch, learning_rates, adversary, moment)
        else:
            result, skip = self._alternating_step(batch, learning_rates, adversary, moment)
        self._taken_change()  # of the second pass of micro batches, so that the policy keeps no tensors
        return dataclasses.replace(result, skipped=skip)

    def clear_gradients(self) -> None:
        """Drop all gradients, such as those of a step that did not end."""
        for engine in (self._encoder, self._viewmaker, *self._learner.values()):
            if engine is not None:
                engine.module.zero_grad(set_to_none=True)

    def _learner_step(
        self, batch: Batch, learning_rates: Mapping[str, float | Tensor], moment: RecordedMoment | None
    ) -> tuple[StepOutput, Tensor]:
        """Train the encoder and the objective, but not the views."""
        result = self._learn(batch, BackwardPass(self._encoder, moment=moment))
        return result, self._step(self._learner, learning_rates, result)

    def _simultaneous_step(
        self,
        batch: Batch,
        learning_rates: Mapping[str, float | Tensor],
        adversary: AdversaryConfig,
        moment: RecordedMoment | None,
    ) -> tuple[StepOutput, Tensor]:
        """Train encoder and viewmaker with one forward and one backward pass, the viewmaker on -weight * loss."""
        assert self._viewmaker is not None
        spec = BackwardPass(self._encoder, reversal=adversary.weight, views_learn=True, moment=moment)
        result = self._learn(batch, spec)
        result.metrics["train/viewmaker_loss"] = -adversary.weight * result.metrics["train/loss"]
        return result, self._step({**self._learner, "viewmaker": self._viewmaker}, learning_rates, result)

    def _alternating_step(
        self,
        batch: Batch,
        learning_rates: Mapping[str, float | Tensor],
        adversary: AdversaryConfig,
        moment: RecordedMoment | None,
    ) -> tuple[StepOutput, Tensor]:
        """Train in the published order: the encoder steps, then the viewmaker, on new views, with the new encoder.

        Each step of encoder or viewmaker is an update. If an update is skipped, the later updates are skipped too.
        """
        assert self._viewmaker is not None
        with self._viewmaker.frozen():
            result, skip = self._learner_step(batch, learning_rates, moment)
        with contextlib.ExitStack() as stack:
            for engine in self._learner.values():
                stack.enter_context(engine.frozen())
            for number in range(1, adversary.viewmaker_steps + 1):
                spec = BackwardPass(
                    self._viewmaker,
                    first_view=2 * number,
                    loss_weight=-adversary.weight,
                    views_learn=True,
                    updates_state=False,
                    moment=moment,
                )
                after = self._learn(batch, spec)
                skip = self._step({"viewmaker": self._viewmaker}, learning_rates, result, skip=skip)
        result.metrics["train/viewmaker_loss"] = -adversary.weight * after.metrics["train/loss"]
        return result, skip

    def _step(
        self,
        engines: Mapping[str, Engine],
        learning_rates: Mapping[str, float | Tensor],
        result: StepOutput,
        *,
        skip: Tensor | None = None,
    ) -> Tensor:
        """Let every engine step, or none if `skip` is true or a gradient is not finite. Return whether it was skipped.

        If the step is skipped, also undoes the changes of `_learn`.
        """
        with stage("optimizer"):
            norms = {name: engine.gradient_norm() for name, engine in engines.items()}
            not_finite = any_not_finite(norms.values())
            skip = not_finite if skip is None else skip | not_finite
            for name, engine in engines.items():
                engine.step(learning_rate=learning_rates[name], skip=skip)
            self._snapshot.restore(skip)
        for name in engines:
            result.metrics[f"train/{name}_gradient_norm"] = norms[name]
        return skip

    def _learn(self, batch: Batch, spec: BackwardPass) -> StepOutput:
        """Run forward pass, objective and backward pass, which computes the gradients for `_step`."""
        self._snapshot.take()
        step = batch.step if spec.moment is None else spec.moment.step
        set_pruned_step(self._encoder.module, seed=self._config.seed, step=step, first_view=spec.first_view)
        num_parts = self._config.memory.micro_batches
        if num_parts == 1:
            groups = self._views_by_group(batch, spec)
            embeddings = self._encode(batch, groups, spec)
            result, loss = self._compare(batch, self._each_view(groups), embeddings, spec)
            with stage("backward"):
                spec.engine.backward(self._with_penalty(loss, spec))
            return result

        parts = [batch.part(number, num_parts) for number in range(num_parts)]
        passing_twice = [self._encoder.module]
        if spec.views_learn and self._viewmaker is not None:  # otherwise each view is made once
            passing_twice.append(self._viewmaker.module)
        with torch.no_grad(), buffers_untouched(*passing_twice):
            groups_by_part = [self._views_by_group(part, spec) for part in parts]
            embeddings_by_part = [
                self._encode(batch, groups, spec, part=number) for number, groups in enumerate(groups_by_part)
            ]
        views = _whole([self._each_view(groups) for groups in groups_by_part])
        embeddings = _whole(embeddings_by_part)
        for z_BD in embeddings:
            z_BD.requires_grad_()
        result, loss = self._compare(batch, views, embeddings, spec)
        with stage("backward"):
            torch.autograd.backward(loss)
        for number, part in enumerate(parts):
            with self._accumulating(number < num_parts - 1):
                part_groups = groups_by_part[number]
                if spec.views_learn:
                    part_groups = self._views_by_group(part, spec)
                part_embeddings = self._encode(batch, part_groups, spec, part=number)
                products = [
                    (z_part_BD * z_BD.grad[number::num_parts]).sum()
                    for z_part_BD, z_BD in zip(part_embeddings, embeddings, strict=True)
                    if z_BD.grad is not None  # None if the objective does not use this view
                ]
                with stage("backward"):
                    spec.engine.backward(self._with_penalty(torch.stack(products).sum(), spec, share=1 / num_parts))
        return result

    def _views_by_group(self, batch: Batch, spec: BackwardPass) -> tuple[Tensor, ...]:
        """Return the views of every sample, from number `spec.first_view` on: one tensor for each group of one size.

        The first group is of two views, 2 B rows with all of the first view first. The second group, if there is one,
        is of the further views, in the same form. They are views of the first input.
        """
        with stage("views"):
            inputs_a, inputs_b = self._to_inputs(batch)
            first_view = spec.first_view
            keys = batch.draw_keys(seed=self._config.seed, view=first_view)
            if spec.moment is not None:
                keys = dataclasses.replace(keys, step=spec.moment.step)
                if batch.draw_index_B is None:  # otherwise the indices count the epochs
                    keys = dataclasses.replace(keys, recorded_epoch=spec.moment.epoch)
            masks = None
            if batch.masks_BHW is not None and batch.masks_b_BHW is not None:
                masks = torch.cat([batch.masks_BHW, batch.masks_b_BHW])
            # Autocast is only for networks: an expert crop in bfloat16 would lose shades of the picture.
            with self._autocast(inputs_a.device) if self._viewmaker is not None else contextlib.nullcontext():
                views: Tensor
                if self._mel is not None and inputs_a.device.type == "cpu":  # whose cache holds fewer spectrograms
                    keys_b = dataclasses.replace(keys, view=first_view + 1)
                    views = torch.cat([self._views(inputs_a, keys), self._views(inputs_b, keys_b)])
                else:
                    views = self._views(torch.cat([inputs_a, inputs_b]), keys.two_views(), masks)
                further = [
                    self._policy.further_view(  # type: ignore[operator]
                        inputs_a, dataclasses.replace(keys, view=first_view + 2 + number), batch.masks_BHW
                    )
                    for number in range(self._config.views.num_further)
                ] + [inputs_a] * self._config.objective.takes_samples
                return (views, torch.cat(further)) if further else (views,)

    def _with_penalty(self, loss: Tensor, spec: BackwardPass, *, share: float = 1.0) -> Tensor:
        """Add a share of the penalty of masks that learn, for the views of the last call, to a loss."""
        take_penalty = getattr(self._learned_part, "take_penalty", None)
        return loss if take_penalty is None or not spec.views_learn else loss + share * take_penalty()

    def _each_view(self, groups: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return one tensor for each view, of views or embeddings with one tensor for each group."""
        return tuple(
            rows for group, num_views in zip(groups, self._group_sizes, strict=True) for rows in group.chunk(num_views)
        )

    def _encode(
        self, batch: Batch, groups: tuple[Tensor, ...], spec: BackwardPass, *, part: int = 0
    ) -> tuple[Tensor, ...]:
        """Return the embeddings of each view, after one pass for each group."""
        if spec.reversal is not None:
            groups = tuple(reverse_gradient(views, spec.reversal) for views in groups)
        with stage("forward"), self._autocast(groups[0].device), self._seeded(batch, spec, part):
            return self._each_view(
                tuple(
                    # Their format is changed once, and not in each convolution.
                    self._encoder(views.to(memory_format=self._memory_format), num_views)
                    for views, num_views in zip(groups, self._group_sizes, strict=True)
                )
            )

    def _compare(
        self, batch: Batch, views: tuple[Tensor, ...], embeddings: tuple[Tensor, ...], spec: BackwardPass
    ) -> tuple[StepOutput, Tensor]:
        """Return the result of the objective, and the loss for the backward pass, weighted."""
        views_a, views_b, *further_views = (each.detach() for each in views)
        pair = ViewPair(
            views_a,
            views_b,
            batch.index_B,
            batch.step,
            spec.updates_state,
            epoch=batch.epoch,
            labels=batch.labels,
            further_views=tuple(further_views),
        )
        z_a_BD, z_b_BD, *further_BD = embeddings
        with stage("forward"), self._autocast(views_a.device):  # for a key encoder; losses switch autocast off
            output: ObjectiveOutput = self._objective(z_a_BD, z_b_BD, pair, *further_BD)
        metrics = {"train/loss": output.loss.detach()}
        metrics |= {f"train/{name}": value for name, value in output.metrics.items()}
        # A product with 1 would take a kernel, and another one in the backward pass.
        loss = output.loss if spec.loss_weight == 1 else spec.loss_weight * output.loss
        result = StepOutput(
            metrics=metrics,
            skipped=self._not_skipped,
            inputs=partial(self._to_inputs, batch),
            mel=self._mel,
            bounded=self._mel is None and self._config.views.is_bounded,
            views_a_BCHW=views_a,
            views_b_BCHW=views_b if batch.inputs_a is batch.inputs_b else None,
            masks_BHW=batch.masks_BHW,
            z_a_BD=z_a_BD.detach()[:, : self._config.encoder.embedding_size],
            z_b_BD=z_b_BD.detach()[:, : self._config.encoder.embedding_size],
            viewmaker_change=self._taken_change(),
        )
        return result, loss

    def _taken_change(self) -> tuple[Tensor, Tensor] | None:
        """Return what a viewmaker got and made, and drop both there; None if these are the inputs and the views."""
        if not isinstance(self._learned_part, Viewmaker):
            return None
        change, self._learned_part.change = self._learned_part.change, None
        return change

    def _to_inputs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        is_expert_image = self._viewmaker is None and self._mel is None  # expert views of pictures are float32
        dtype = torch.float32 if is_expert_image else self._config.parameter_dtype

        def to_input(stored: Tensor) -> Tensor:
            if self._mel is not None:
                return stored.to(dtype)
            # Only a viewmaker keeps the format of its input; other policies return contiguous views.
            return from_bytes(stored, dtype, torch.preserve_format if self._viewmaker is None else self._memory_format)

        a = to_input(batch.inputs_a)
        return a, a if batch.inputs_b is batch.inputs_a else to_input(batch.inputs_b)

    @contextlib.contextmanager
    def _accumulating(self, more_to_come: bool) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if more_to_come:
                for engine in (self._encoder, self._viewmaker):
                    if engine is not None:
                        stack.enter_context(engine.accumulating())
            yield

    def _seeded(self, batch: Batch, spec: BackwardPass, part: int) -> AbstractContextManager[None]:
        """Return a context in which the encoder draws a function of seed, step, rank, part and update of the step.

        A recorded step cannot seed anything, so an encoder of the user's own must not draw in one.
        """
        if not self._seeds_encoder or spec.moment is not None:
            return contextlib.nullcontext()
        key = key_words(1, self._config.seed, "random layers", batch.step, rank(), part, spec.first_view)
        return seeded(int(key[0]), batch.index_B.device)

    def _autocast(self, device: torch.device) -> AbstractContextManager[None]:
        return torch.autocast(device.type, dtype=torch.bfloat16, enabled=self._config.precision == "bfloat16")


def _whole(parts: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Join the parts of each view to the whole batch, in the order of the batch."""
    return tuple(interleave(of_view) for of_view in zip(*parts, strict=True))
