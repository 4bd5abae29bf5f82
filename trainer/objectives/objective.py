"""The interface of objectives: a module that turns the embeddings of two views into a loss and scalars to log."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar, Final

from pydantic import BeforeValidator, SerializeAsAny
from torch import Tensor, nn
from torch.nn import functional as F

from data_pipeline.core.kinds import KindConfig, Kinds
from trainer.models.batch_norm import share_running_statistics

# The config class of each kind. A new objective of this project needs a line here and its own file.
OBJECTIVES: Final[Mapping[str, str]] = {
    "nt_xent": "trainer.objectives.nt_xent:NTXentConfig",
    "nt_xent_published": "trainer.objectives.published_nt_xent:PublishedNTXentConfig",
    "info_nce": "trainer.objectives.info_nce:InfoNCEConfig",
    "split": "trainer.objectives.split_loss:SplitLossConfig",
    "linear": "trainer.objectives.linear_loss:LinearLossConfig",
    "barlow_twins": "trainer.objectives.barlow_twins:BarlowTwinsConfig",
    "moco": "trainer.objectives.moco:MoCoConfig",
    "simsiam": "trainer.objectives.simsiam:SimSiamConfig",
    "instance_discrimination": "trainer.objectives.instance_discrimination:InstanceDiscriminationConfig",
    "symmetric_info_nce": "trainer.objectives.symmetric_info_nce:SymmetricInfoNCEConfig",
    "dcl": "trainer.objectives.dcl:DCLConfig",
    "macl": "trainer.objectives.macl:MACLConfig",
    "ifm": "trainer.objectives.ifm:IFMConfig",
    "nt_xent_cycle": "trainer.objectives.nt_xent_cycle:NTXentCycleConfig",
    "nt_xent_decoder": "trainer.objectives.nt_xent_decoder:NTXentDecoderConfig",
    "sieve": "trainer.objectives.sieve:SieveConfig",
    "vicreg": "trainer.objectives.vicreg:VICRegConfig",
    "sigreg": "trainer.objectives.sigreg:SIGRegConfig",
    "byol": "trainer.objectives.byol:BYOLConfig",
    "dino": "trainer.objectives.dino:DINOConfig",
    "supervised": "trainer.objectives.supervised:SupervisedConfig",
    "joint_contrastive": "trainer.objectives.joint_contrastive:JointContrastiveConfig",
}


@dataclass(frozen=True)
class ViewPair:
    """The inputs of a step, for objectives that need more than embeddings.

    Attributes:
        views_a_BCHW, views_b_BCHW: the two views of this rank's part of the batch.
        index_B: (B,) int64, dataset indices of the samples.
        step: the training step, from 0.
        updates_state: whether this call may change the state of the objective (queue, bank, momentum encoder). False
            if only the viewmaker learns from these views.
        epoch: the epoch of the step, from 0; None if the objective does not need it.
        labels: each label of the samples by name, (B,) int64, as in `data_pipeline.core.batch.Batch`.
        further_views: (B, C, H, W) each, the views beside the first two, which may have another size.
    """

    views_a_BCHW: Tensor
    views_b_BCHW: Tensor
    index_B: Tensor
    step: int
    updates_state: bool = True
    epoch: int | None = None
    labels: Mapping[str, Tensor] = field(default_factory=dict)
    further_views: tuple[Tensor, ...] = ()

    def required_epoch(self) -> int:
        """Return the epoch. Raises `ValueError` if it was not given."""
        if self.epoch is None:
            raise ValueError(
                "this objective changes with the epoch; give ViewPair the number of the epoch, from 0, as epoch=..."
            )
        return self.epoch


@dataclass(frozen=True)
class ObjectiveOutput:
    """The result of an objective.

    `loss` is a scalar with gradient for this rank's part of the batch. Its mean over the ranks is the global loss.
    `metrics` are scalars without gradient for the same part, on the device of the loss.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor]


@dataclass(frozen=True)
class ObjectiveInputs:
    """The facts from which an objective is built.

    Attributes:
        encoder: the untrained encoder, on the device of the training.
        embedding_size: the number D of dimensions of an embedding.
        num_samples: the size of the train set; 0 if it is not known and the objective does not need it.
        seed: the seed of the run.
        image_channels: the number C of channels of a view; 1 for spectrograms.
        num_classes: the number of classes of each label of the train set, by name; see
            `trainer.mixture.num_classes`. Empty if it is not known and the objective does not need it.
    """

    encoder: nn.Module
    embedding_size: int
    num_samples: int
    seed: int
    image_channels: int = 3
    num_classes: Mapping[str, int] = field(default_factory=dict)


class BaseObjectiveConfig(KindConfig):
    """The base of the configs of objectives. Says what its objective needs, and builds it.

    Attributes:
        copies_encoder: whether the objective keeps a copy of the encoder, such as a teacher. DeepSpeed may then not cut
            the encoder into pieces; FSDP may if the copy is a `trainer.models.momentum.MomentumCopy`.
        has_trained_layers: whether the objective has parameters that are trained, such as a predictor. ZeRO 3 is then
            refused before the start.
        needs_num_samples: whether the objective has state for every sample of the train set. A plan then needs their
            number, and does not allocate that state.
        needs_labels: whether the objective reads labels. A plan then needs the labels of the train set.
        takes_further_views: whether the objective takes more than two views of a sample. If not, view policies with
            further views are refused.
        can_be_recorded: whether the objective launches the same kernels at each step, and decides nothing on the host,
            for example by the number of the step. Then a step can be recorded once and replayed (`compile`).
        note: a sentence for the log and the report that explains an unusual loss; None if the loss is as expected.
    """

    kinds: ClassVar[Kinds] = Kinds("objective", group="objectives", built_in=OBJECTIVES)
    copies_encoder: ClassVar[bool] = False
    has_trained_layers: ClassVar[bool] = False
    needs_num_samples: ClassVar[bool] = False
    needs_labels: ClassVar[bool] = False
    takes_further_views: ClassVar[bool] = False
    can_be_recorded: ClassVar[bool] = False
    note: ClassVar[str | None] = None

    @property
    def trains_second_view(self) -> bool:
        """Return whether the embeddings of the second view get a gradient, without which no viewmaker learns there."""
        return True

    @property
    def takes_samples(self) -> bool:
        """Return whether the objective takes the samples without a view as their last further view."""
        return False

    def why_not_recorded(self, run: Any) -> str | None:
        """Return the reason for which a step with this objective cannot be recorded; None if it can."""
        if self.can_be_recorded:
            return None
        return f"objective {self.kind} may launch other kernels at each step; choose another objective"

    def check_labels(self, num_classes: Mapping[str, int]) -> None:
        """Raise `UserError` if the labels of the train set, given as in `ObjectiveInputs`, do not fit the objective."""

    def build(self, given: ObjectiveInputs) -> Objective:
        """Return the objective, with its weights from torch's default generator."""
        raise NotImplementedError(f"{type(self).__qualname__} has no method build")


class Objective(nn.Module, ABC):
    """A loss. Every rank calls it with embeddings (B, D) of both views of its part of the batch, in any float type.

    An objective of any number of views has `forward(z_a_BD, z_b_BD, pair, *further_BD)`, and a config with
    `takes_further_views`.

    Parameters with a gradient (a predictor) are trained together with the encoder. Buffers and frozen modules (a queue,
    a bank, a momentum encoder) are state, which every checkpoint saves.
    """

    @abstractmethod
    def forward(self, z_a_BD: Tensor, z_b_BD: Tensor, pair: ViewPair) -> ObjectiveOutput: ...

    def saved_state(self) -> dict[str, Tensor]:
        """Return all state, equal on any number of ranks. Every rank must call this at the same time."""
        share_running_statistics(self)
        return self.state_dict()


class PureObjective(Objective):
    """An objective without state: a pure function of the embeddings of both views, and of further ones.

    `loss` is called with the embeddings, (B, D) each, and `settings`, and returns an `ObjectiveOutput`.
    """

    def __init__(self, loss: Callable[..., ObjectiveOutput], **settings: Any) -> None:
        super().__init__()
        self._loss = partial(loss, **settings)

    def forward(
        self, z_a_BD: Tensor, z_b_BD: Tensor, pair: ViewPair | None = None, *further_BD: Tensor
    ) -> ObjectiveOutput:
        return self._loss(z_a_BD, z_b_BD, *further_BD)


def mean_cosine(z_a_BD: Tensor, z_b_BD: Tensor) -> Tensor:
    """Return the mean cosine of the embeddings of the two views, a scalar without gradient.

    Every objective logs it as alignment. It is 1 if the views coincide (Wang and Isola 2020, up to scale and offset).
    """
    return F.cosine_similarity(z_a_BD.detach().float(), z_b_BD.detach().float()).mean()


def contrastive_output(
    loss: Tensor, log_probability_N: Tensor, z_a_BD: Tensor, z_b_BD: Tensor, **further: Tensor
) -> ObjectiveOutput:
    """Return the loss with the metrics of every contrastive objective, and with `further` ones.

    alignment: the `mean_cosine` of the two views, which is computed unless it is given.
    positive_probability: the mean softmax probability of an anchor's positive; chance is 1 / number of candidates.
    """
    if "alignment" not in further:
        further["alignment"] = mean_cosine(z_a_BD, z_b_BD)
    metrics = {"positive_probability": log_probability_N.detach().exp().mean()}
    return ObjectiveOutput(loss, metrics | {name: value.detach() for name, value in further.items()})


# The type of a section `objective`: the config of any objective, found by its kind.
ObjectiveConfig = Annotated[SerializeAsAny[BaseObjectiveConfig], BeforeValidator(BaseObjectiveConfig.kinds.parse)]
