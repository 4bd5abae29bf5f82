"""The encoder: a network without its classifier (the trunk), and a head that computes the embedding.

Inputs are pictures (B, C, H, W) in [0, 1] or spectrograms. The encoder itself normalises them, so that no view policy
needs the mean and deviation of the data.

Shapes: B pictures, C channels of the picture or of the trunk's last map, H by W pixels, F features, D embedding.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Self, TypeAlias, get_args

import torch
from pydantic import BeforeValidator, Field, SerializeAsAny, field_validator, model_validator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from data_pipeline.core.errors import UserError
from data_pipeline.core.kinds import KindConfig, Kinds
from data_pipeline.core.schema import BatchSize, CountOrZero, ImageSize, InputMean, InputStd, LayerSize, Line, Schema
from trainer.distributed.collectives import is_distributed
from trainer.models.batch_norm import depends_on_row_order, grouped_statistics
from trainer.models.convnet import ConvNet
from trainer.models.early_head import EarlyHead
from trainer.models.heads import HeadConfig, build_head
from trainer.models.late_pruning import LatePruningConfig, prune_late
from trainer.models.resnet import Init, blocks_of_depth, resnet_trunk, wide_resnet_trunk
from trainer.models.timm_trunk import OWN_ARGUMENTS, TimmTrunk
from trainer.models.trunk import Trunk

_Decided = Literal["resnet18_small", "resnet34_small", "resnet50_small", "resnet18", "resnet34", "resnet50", "resnet10"]
_Open = Literal["resnet18_by_size", "resnet34_by_size", "resnet50_by_size"]
ResNetKind = Literal[_Decided, _Open]
_BY_SIZE: Final = "_by_size"
_WRAPPERS: Final = (nn.DataParallel, DistributedDataParallel, AveragedModel)  # call the module inside as it is
TIMM: Final = "timm"  # values of `weights` that are no paths
TORCHVISION: Final = "torchvision:"
STANDARD_FROM: Final = 64  # pixels of the shorter side, from which a network by size has the standard form

# The config class of each kind. A new encoder of this project needs a line here.
ENCODERS: Final[Mapping[str, str]] = {
    **dict.fromkeys(get_args(ResNetKind), "trainer.models.encoder:ResNetConfig"),
    "wrn_34_5": "trainer.models.encoder:WideResNet34x5Config",
    "convnet": "trainer.models.encoder:ConvNetConfig",
    "timm": "trainer.models.encoder:TimmConfig",
}


class Normalization(Schema):
    """The mean of each input channel, which the encoder subtracts, and the standard deviation by which it divides."""

    mean: tuple[InputMean, ...]
    std: tuple[InputStd, ...]


Option: TypeAlias = bool | int | float | Line  # an argument of a timm model


class BaseEncoderConfig(KindConfig):
    """The base of the configs of encoders: the settings of every encoder, and how its trunk is built.

    batch_norm: the rows that share statistics. "synchronized" is the global batch. "local" is the part of each rank, so
        results depend on the number of ranks. "split" is each of `batch_norm_splits` equal groups of the global batch;
        the head is then still synchronised.
    mean, std: the normalisation of each input channel, for pictures in [0, 1]. None takes the values in the manifest of
        the train set; for spectrograms 0 and 1, because they are normalised already.
    probe_reads: whether the linear probe reads every value of the trunk's last map, or the pooled map.
    late_pruning: in training, the last blocks encode the second view with a random part of their weights, which each
        step draws; None for all weights. See `trainer.models.late_pruning`.
    early_head: the number of the block, from 1, that in training adds columns to the embedding, for the objective
        `sieve`; 0 for none. See `trainer.models.early_head`.
    frozen_stages: the stem and this number of stages (of a transformer of timm: blocks) are kept as they begin, with
        the running statistics of their batch norm; 0 for the stem alone, None to train all.
    weights: the weights with which the trunk begins; None draws them. A file of torch or safetensors, an export, a
        directory of the Hub, a run directory or one of its checkpoints; "timm" for those of the model `name`; or
        "torchvision:" and a name such as ResNet18_Weights.IMAGENET1K_V1. `trainer.models.weights.fit` has the rule by
        which names match.
    weights_normalization: whether mean and std become those by which pictures were normalised when the weights were
        trained ("own"), or stay as they are set here ("config"), which a file that does not say them needs.
    weights_prefix: the beginning of the names of the encoder's tensors there; None finds it.
    weights_except: beginnings of names of tensors that are not taken, which keep their drawn weights.
    weights_sha256: the hash of all tensors of `weights`, see `trainer.models.weights.TrainedWeights`; None takes that
        of the first start of a run.
    """

    kinds: ClassVar[Kinds] = Kinds("encoder", group="encoders", built_in=ENCODERS)

    in_channels: LayerSize = 3
    embedding_size: LayerSize = 128
    head: HeadConfig = HeadConfig()
    batch_norm: Literal["synchronized", "local", "split"] = "synchronized"
    batch_norm_splits: BatchSize = 8
    mean: tuple[InputMean, ...] | None = None
    std: tuple[InputStd, ...] | None = None
    probe_reads: Literal["map", "pooled"] = "map"
    late_pruning: LatePruningConfig | None = None
    early_head: CountOrZero = 0
    frozen_stages: CountOrZero | None = None
    weights: Line | None = None
    weights_normalization: Literal["own", "config"] = "own"
    weights_prefix: Line | None = None
    weights_except: tuple[Line, ...] = ()
    weights_sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = None

    def check(self, run: Any) -> None:
        if self.early_head and run.objective.kind != "sieve":
            raise ValueError("encoder.early_head is for the objective sieve; set objective.kind=sieve, or it to 0")
        if self.late_pruning is None:
            return
        if run.views.num_further or run.objective.takes_samples or not run.objective.trains_second_view:
            raise ValueError(
                "encoder.late_pruning prunes the second of two views, so it needs views without further ones and an "
                "objective that trains the second view and takes no samples; choose others, or set it to null"
            )
        if self.batch_norm != "synchronized":
            raise ValueError(
                f"encoder.late_pruning needs both views in one pass, but with batch_norm={self.batch_norm} they pass "
                "one after the other; set batch_norm=synchronized"
            )

    @model_validator(mode="after")
    def _one_mean_and_std_a_channel(self) -> Self:
        if self.mean is None and self.std is None:
            return self
        if self.mean is None or self.std is None:
            raise ValueError("mean and std belong together; set both, or neither to use the values of the train set")
        if not len(self.mean) == len(self.std) == self.in_channels:
            raise ValueError(
                f"in_channels is {self.in_channels}, but there are {len(self.mean)} numbers in mean and "
                f"{len(self.std)} in std; set one for each channel (mean=[0], std=[1] for a normalised spectrogram)"
            )
        return self

    @property
    def normalization(self) -> Normalization | None:
        """Return `mean` and `std`; None to use the values of the train set."""
        return None if self.mean is None or self.std is None else Normalization(mean=self.mean, std=self.std)

    @property
    def weights_path(self) -> Path | None:
        """Return the path of `weights`; None if there are none, or if a library fetches them."""
        is_path = self.weights is not None and self.weights != TIMM and not self.weights.startswith(TORCHVISION)
        return Path(self.weights).expanduser() if is_path and self.weights is not None else None

    def absolute(self) -> Self:
        """Return a copy with an absolute path of `weights`, which other commands find in other directories."""
        path = self.weights_path
        return self if path is None else self.model_copy(update={"weights": str(path.absolute())})

    @property
    def form_is_open(self) -> bool:
        """Return whether the form of the network depends on the size of its inputs; see `with_form`."""
        return False

    def with_form(self, *, height: int, width: int) -> Self:
        """Return the config for inputs of one size, with no form open."""
        return self

    def build_trunk(self) -> Trunk:
        """Return the network without its classifier, with weights from torch's default generator."""
        raise NotImplementedError(f"{type(self).__qualname__} has no method build_trunk")


class ResNetConfig(BaseEncoderConfig):
    """A residual network. `kind` sets its depth and its form, and the defaults of `init` and `width`.

    - resnet18, 34, 50: the standard form, as torchvision has it. With one input channel, resnet18 is the sound encoder
      of Tamkin et al. 2022, who replace the stem of torchvision's network.
    - resnet18_small, 34, 50: the small form, a 3x3 stem of stride 1 without max-pooling (Chen et al. 2020, appendix
      B.9). Tamkin et al. 2022 and Huang et al. 2023 train resnet18_small from torch's first weights.
    - resnet18_by_size, 34, 50: the standard form for inputs of 64 x 64 and more, else the small form.
    - resnet10: the small form with one basic block a stage. At width 16 it has 324,048 parameters, for CPUs. It is the
      only kind whose width can be set; the others have 64 channels in the first stage.

    stem_relu: whether a ReLU follows the stem; the published code of Huang et al. 2023 has none.
    init: the distribution of the initial weights of convolutions, see `trainer.models.resnet.Init`.
    width: the number of channels in the first stage.
    """

    kind: ResNetKind
    stem_relu: bool = True
    init: Init = "torch"
    width: Annotated[int, Field(ge=1, le=1_024)] = 64

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_kind(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        kind = str(values.get("kind"))
        if kind == "resnet10":
            return {"width": 16} | values
        return values if kind.endswith("_small") else {"init": "torchvision"} | values

    @model_validator(mode="after")
    def _only_resnet10_has_another_width(self) -> Self:
        if self.width != 64 and self.kind != "resnet10":
            raise ValueError(f"width is {self.width}, but a {self.kind} has width 64; only a resnet10 can have another")
        return self

    @property
    def form_is_open(self) -> bool:
        return self.kind.endswith(_BY_SIZE)

    @property
    def depth(self) -> int:
        return int(self.kind.removeprefix("resnet").partition("_")[0])

    @property
    def form(self) -> Literal["standard", "small"]:
        if self.form_is_open:
            raise ValueError(f"the form of a {self.kind} depends on the size of its inputs; call with_form first")
        return "small" if self.kind.endswith("_small") or self.kind == "resnet10" else "standard"

    def with_form(self, *, height: int, width: int) -> Self:
        if not self.form_is_open:
            return self
        ending = "" if min(height, width) >= STANDARD_FROM else "_small"
        return self.model_copy(update={"kind": self.kind.removesuffix(_BY_SIZE) + ending})

    def build_trunk(self) -> Trunk:
        return resnet_trunk(
            *blocks_of_depth(self.depth),
            form=self.form,
            width=self.width,
            in_channels=self.in_channels,
            stem_relu=self.stem_relu,
            init=self.init,
        )


class WideResNet34x5Config(BaseEncoderConfig):
    """WRN-34-5 for small pictures (Zagoruyko and Komodakis 2016), the network of Wen and Li 2021."""

    kind: Literal["wrn_34_5"] = "wrn_34_5"

    def build_trunk(self) -> Trunk:
        return wide_resnet_trunk(depth=34, widening=5, in_channels=self.in_channels)


class ConvNetConfig(BaseEncoderConfig):
    """The network of the RandBit experiment (Chen, Luo and Li 2021): a few convolutions and a dense layer.

    channels: the outputs of each 3x3 convolution of stride 2.
    dense_size: the outputs of a layer that reads the whole map, and that probes and the head read; None for none, so
        that they read the map and its mean.
    image_size: the height and width of the inputs, on which the dense layer depends. None takes those of the data.

    The published projector has `embedding_size=64`, and its head hidden_sizes (256,), `batch_norm`, `bias=False` and
    `defaults="keras"`.
    """

    kind: Literal["convnet"] = "convnet"
    channels: Annotated[tuple[LayerSize, ...], Field(min_length=1, max_length=16)] = (32, 64, 64)
    dense_size: LayerSize | None = 128
    image_size: tuple[ImageSize, ImageSize] | None = None

    @property
    def form_is_open(self) -> bool:
        return self.dense_size is not None and self.image_size is None

    def with_form(self, *, height: int, width: int) -> Self:
        return self.model_copy(update={"image_size": (height, width)}) if self.form_is_open else self

    def build_trunk(self) -> Trunk:
        return ConvNet(
            self.channels,
            dense_size=self.dense_size,
            image_size=self.image_size,
            in_channels=self.in_channels,
        )


class TimmConfig(BaseEncoderConfig):
    """A backbone of timm (install the extra "timm"). Its pretrained weights are those of `weights="timm"`.

    name: its name in timm.
    options: other arguments of `timm.create_model`, such as {"img_size": 32, "patch_size": 4} for a vision transformer.

    The tokens of a transformer replace the map.
    """

    kind: Literal["timm"] = "timm"
    name: Line
    options: dict[Line, Option] = {}  # noqa: RUF012  pydantic copies defaults
    probe_reads: Literal["map", "pooled"] = "pooled"

    @field_validator("options")
    @classmethod
    def _options_are_free(cls, options: dict[Line, Option]) -> dict[Line, Option]:
        taken = sorted(OWN_ARGUMENTS & options.keys())
        if taken:
            raise ValueError(
                f"{taken[0]} cannot be set here: encoder.in_channels and encoder.head set channels and head, and "
                "encoder.weights=timm its weights"
            )
        return options

    def check(self, run: Any) -> None:
        super().check(run)
        if isinstance(run.memory.encoder_checkpointing, int):
            raise ValueError("a timm encoder counts as one block; set memory.encoder_checkpointing to whole or none")

    def build_trunk(self) -> Trunk:
        return TimmTrunk(self.name, in_channels=self.in_channels, options=self.options)


# The type of a section `encoder`: the config of any encoder, found by its kind.
EncoderConfig = Annotated[SerializeAsAny[BaseEncoderConfig], BeforeValidator(BaseEncoderConfig.kinds.parse)]


class InputSizeError(UserError):
    """The error of an encoder that takes inputs, but none of this size."""


class Encoder(nn.Module):
    """A network from pictures to embeddings. `trunk` ends with the last map, before pooling.

    The parameters of `trunk` have torchvision's names, and those of a timm `trunk.model` have timm's names. Under
    autocast, the trunk runs in the autocast dtype. Normalisation, pooling, head and all outputs are float32.

    `config` is the config from which `build_encoder` made it, with the mean and std in use; None for other encoders.
    """

    mean_C11: Tensor
    std_C11: Tensor

    def __init__(
        self,
        trunk: Trunk,
        head: nn.Module,
        *,
        in_channels: int,
        normalization: Normalization | None,
        probe_reads: Literal["map", "pooled"] = "map",
        config: EncoderConfig | None = None,
        early_head: EarlyHead | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.trunk = trunk
        self.head = head
        self.early_head = early_head
        self.normalization = normalization
        self._probe_reads = probe_reads
        unknown = (math.nan,) * in_channels
        mean, std = (unknown, unknown) if normalization is None else (normalization.mean, normalization.std)
        # Not in checkpoints, because the config or the run's provenance holds them.
        self.register_buffer("mean_C11", torch.tensor(mean).view(in_channels, 1, 1), persistent=False)
        self.register_buffer("std_C11", torch.tensor(std).view(in_channels, 1, 1), persistent=False)

    def forward(self, views_BCHW: Tensor, num_groups: int = 1) -> Tensor:
        """Return embeddings (B, D) for an objective; they do not have unit length. An early head adds columns.

        In training, batch norm treats each of `num_groups` equal runs of rows as a separate batch, one after the other.
        If all batch norms are synchronised, the groups pass together on a GPU and over ranks, which needs fewer kernels
        and collectives and gives the same results. A single CPU has more of one group in its cache.

        Raises `UserError` as `normalise` does, and `ValueError` if the groups do not divide the rows.
        """
        if num_groups != 1 and (num_groups < 1 or len(views_BCHW) % num_groups):
            raise ValueError(f"{len(views_BCHW)} rows cannot be cut into {num_groups} equal groups")
        is_pruned = self.config is not None and self.config.late_pruning is not None  # by the rows of the whole pass
        on_one_cpu = not is_distributed() and views_BCHW.device.type == "cpu"
        together = is_pruned or not (on_one_cpu or depends_on_row_order(self))
        if num_groups == 1 or together:
            with grouped_statistics(num_groups):
                return self._embed(views_BCHW)
        return torch.cat([self._embed(group_BCHW) for group_BCHW in views_BCHW.chunk(num_groups)])

    def _embed(self, views_BCHW: Tensor) -> Tensor:
        early_head = self.early_head if self.training else None
        outputs: list[Tensor] = []
        with contextlib.nullcontext() if early_head is None else early_head.reading(self.trunk, into=outputs):
            pooled_BC = self.pooled(views_BCHW)
        with torch.autocast(pooled_BC.device.type, enabled=False):
            embeddings_BD: Tensor = self.head(pooled_BC)
            if early_head is not None:
                embeddings_BD = torch.cat([embeddings_BD, early_head(_at_least_float32(outputs[0]))], dim=1)
        return embeddings_BD

    def features(self, views_BCHW: Tensor) -> Tensor:
        """Return the input of the linear probe, (B, F): the trunk's last map, flattened, or the result of `pooled`."""
        return self.features_and_pooled(views_BCHW)[0]

    def features_and_pooled(self, views_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        """Return the results of `features` and of `pooled`, (B, F) and (B, C), by one pass through the trunk."""
        map_BCHW = self._map(views_BCHW)
        pooled_BC = self._pool(map_BCHW)
        return pooled_BC if self._probe_reads == "pooled" else _at_least_float32(map_BCHW).flatten(1), pooled_BC

    def pooled(self, views_BCHW: Tensor) -> Tensor:
        """Return one vector for each picture, (B, C), the input of kNN.

        It is the mean of the trunk's last map over its pixels, or the input of the classifier of a timm model.
        """
        return self._pool(self._map(views_BCHW))

    def _pool(self, map_BCHW: Tensor) -> Tensor:
        with torch.autocast(map_BCHW.device.type, enabled=False):
            return _at_least_float32(self.trunk.pool(map_BCHW))

    def feature_size(self, height: int, width: int) -> int:
        """Return F for pictures of this size. Raises `UserError` if the trunk does not accept them."""
        map_1CHW = copy.deepcopy(self).to("meta").eval()._map_of_size(height, width)
        return self.pooled_size if self._probe_reads == "pooled" else map_1CHW[0].numel()

    @property
    def pooled_size(self) -> int:
        return self.trunk.num_channels

    @torch.no_grad()
    def _map_of_size(self, height: int, width: int) -> Tensor:
        """Return the map of an input of zeros. Raises `InputSizeError` if the trunk does not accept it."""
        refused = f"the encoder cannot take inputs of {height} x {width}"
        try:
            # Not normalised: the size is asked before the mean and std are known.
            map_1CHW: Tensor = self.trunk(
                torch.zeros(1, len(self.mean_C11), height, width, device=self.mean_C11.device)
            )
            self.trunk.pool(map_1CHW)
        except (AssertionError, RuntimeError, ValueError) as error:
            raise InputSizeError(f"{refused}: {' '.join(str(error).split()).rstrip('.')}") from None
        if map_1CHW.numel() == 0:
            raise InputSizeError(f"{refused}: the map has no pixels left")
        return map_1CHW

    def _map(self, views_BCHW: Tensor) -> Tensor:
        if views_BCHW.shape[1] != len(self.mean_C11):  # otherwise the mean could be broadcast
            raise ValueError(
                f"the encoder takes {len(self.mean_C11)} channels (in_channels), got views {tuple(views_BCHW.shape)}"
            )
        map_BCHW: Tensor = self.trunk(self.normalise(views_BCHW))
        return map_BCHW

    def normalise(self, views_BCHW: Tensor) -> Tensor:
        """Return pictures less the mean and divided by the standard deviation of their channels, at least float32.

        Raises `UserError` if the encoder has no mean and std, or if the pictures are whole numbers. Their range is not
        checked, because the host would wait for it.
        """
        if self.normalization is None:
            raise UserError(
                "the encoder has no mean and std by which it normalises pictures; set mean and std in its config, or "
                "pass normalization= to build_encoder (a mean of 0 and a std of 1 leave pictures as they are)"
            )
        if not views_BCHW.is_floating_point():
            kind = str(views_BCHW.dtype).removeprefix("torch.")
            raise UserError(f"the encoder takes pictures of a floating type in [0, 1], got {kind}; divide bytes by 255")
        # Divided in place: on a CPU, another copy of the batch takes as long as the division.
        return (_at_least_float32(views_BCHW) - self.mean_C11).div_(self.std_C11)


def build_encoder(config: EncoderConfig, *, normalization: Normalization | None = None) -> Encoder:
    """Return an encoder with new weights from torch's default generator.

    `normalization` is used if the config has no mean and std. If both are None, the encoder has its parameters, but
    refuses pictures.

    Raises `UserError` if timm does not take the options, or if the encoder has no batch norm of the kind in the config.
    Raises `ValueError` if its form is not decided.
    """
    trunk = config.build_trunk()
    if config.batch_norm == "split":
        trunk.split_batch_norm(config.batch_norm_splits)
    elif config.batch_norm == "synchronized":
        trunk.synchronize_batch_norm()
    if config.late_pruning is not None:
        prune_late(trunk, config.late_pruning)
    if config.frozen_stages is not None:
        trunk.freeze(config.frozen_stages)
    head_norm: Literal["synchronized", "local"] = "local" if config.batch_norm == "local" else "synchronized"
    head = build_head(config.head, trunk.num_channels, config.embedding_size, batch_norm=head_norm)
    early_head = EarlyHead(trunk, config.early_head, config.embedding_size) if config.early_head else None
    normalization = config.normalization or normalization
    if normalization is not None:
        config = config.model_copy(update={"mean": normalization.mean, "std": normalization.std})
    return Encoder(
        trunk,
        head,
        in_channels=config.in_channels,
        normalization=normalization,
        probe_reads=config.probe_reads,
        config=config,
        early_head=early_head,
    )


def inside_wrappers(module: Any) -> Any:
    """Return the module inside DataParallel, DistributedDataParallel, AveragedModel and `torch.compile`, or itself."""
    while isinstance(module, _WRAPPERS) or hasattr(module, "_orig_mod"):
        module = module.module if isinstance(module, _WRAPPERS) else module._orig_mod
    return module


@functools.lru_cache(maxsize=256)  # a study has hundreds of runs and a few encoders
def check_input_size(config: EncoderConfig, *, height: int, width: int) -> None:
    """Raise `InputSizeError` if an encoder of this config does not accept inputs of that size.

    Raises `UserError` like `build_encoder`, if there is no such encoder for any size.

    Tries an encoder on the meta device first, which needs no memory. If that fails, tries a real encoder, because some
    models of timm cannot be built or run on the meta device. Equal configs and sizes are tried once in a process.
    """
    config = config.with_form(height=height, width=width)
    with contextlib.suppress(UserError), torch.device("meta"):
        build_encoder(config).eval()._map_of_size(height, width)
        return
    with torch.random.fork_rng(devices=[]):
        build_encoder(config).eval()._map_of_size(height, width)


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
