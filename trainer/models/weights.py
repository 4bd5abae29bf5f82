"""Take weights that others have trained: read them, find the tensors of an encoder among them by name, load them.

A file may hold mappings inside mappings. The name of a tensor is its path there, such as
`state_dict.module.encoder_q.conv1.weight`. `fit` has the one rule that finds the tensors of an encoder.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from data_pipeline.core.errors import UserError
from trainer.models.encoder import Normalization
from trainer.models.timm_trunk import load_timm

# The first parts of the names of classifiers and projectors, which an encoder leaves aside.
_CLASSIFIER: Final = "classifier"
HEADS: Final = frozenset(
    {"fc", "linear", _CLASSIFIER, "head", "last_linear"} | {"projection_head", "projector", "prototypes", "predictor"}
)
_COPIES: Final = ("momentum", "target", "encoder_k")  # words in the names of networks that follow the trained one
_COUNTER: Final = "num_batches_tracked"  # torch before 1.0 did not save it, and no batch norm here reads it
_NUMBERED: Final = re.compile(r"((?:[^.]*[^.0-9][^.]*\.)*)([0-9]+)\.(.+)")  # the first part of a name that is a number
_MOST_NAMES: Final = 20  # of each kind that an error lists


@dataclass(frozen=True)
class TrainedWeights:
    """Tensors that somebody has trained, by name.

    Attributes:
        where: where they come from, for messages.
        normalization: the mean and std by which their pictures were normalised; None if that is not known.
        image_size: the height and width of these pictures; None if that is not known.
    """

    where: str
    tensors: Mapping[str, Tensor]
    normalization: Normalization | None = None
    image_size: tuple[int, int] | None = None

    @cached_property
    def sha256(self) -> str:
        """Return the SHA-256 of all tensors with their names, in the order of the names."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.tensors.items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return all tensors in a file of torch or safetensors, by their paths in it. Runs no code of the file.

    Raises `UserError` if it cannot be read or holds anything but data.
    """
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        return dict(_flat(torch.load(path, map_location="cpu", weights_only=True)))
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        raise UserError(
            f"{path} holds more than tensors{f', {named[1]}' if named else ''}, and reading it would run code of its "
            "author; if you trust it, write its state_dict alone: "
            "torch.save(torch.load(PATH, weights_only=False)['state_dict'], 'weights.pt')"
        ) from None
    except (OSError, RuntimeError, EOFError, ValueError, safetensors.SafetensorError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"cannot read weights from {path} ({reason}); pass a file of torch.save or safetensors"
        ) from None


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key))


def weights_of_timm(name: str, *, in_channels: int, options: Mapping[str, Any]) -> TrainedWeights:
    """Return the pretrained weights of a timm model, which timm fits to `in_channels` and to its other `options`.

    timm keeps them in the cache of Hugging Face. Raises `UserError` if it has none, or if they cannot be fetched.
    """
    timm = load_timm()
    call = f"timm.create_model({name!r}, pretrained=True)"
    with _fetching(f"weights of timm's {name}", call), torch.random.fork_rng(devices=[]):
        model = timm.create_model(name, pretrained=True, num_classes=0, in_chans=in_channels, **options)
    facts = model.pretrained_cfg
    size = tuple(facts["input_size"][-2:])
    return TrainedWeights(f"timm's {name}", model.state_dict(), normalization_in(facts), size)


def weights_of_torchvision(name: str) -> TrainedWeights:
    """Return weights by their name in torchvision, such as "ResNet18_Weights.IMAGENET1K_V1", which it caches.

    A name of a model, such as "resnet18", means its default weights. Raises `UserError` if there are none of this name,
    or if they cannot be fetched.
    """
    from torchvision import models  # takes as long to import as torch

    with _fetching(f"weights torchvision:{name}", f"torchvision.models.get_weight({name!r}).get_state_dict()"):
        weights = models.get_weight(name) if "." in name else models.get_model_weights(name).DEFAULT
        tensors = weights.get_state_dict(progress=False, check_hash=True)
    transforms = weights.transforms()
    normalization = Normalization(mean=transforms.mean, std=transforms.std)
    return TrainedWeights(f"torchvision's {weights}", tensors, normalization, (transforms.crop_size * 2)[:2])


def normalization_in(facts: Mapping[str, Any]) -> Normalization | None:
    """Return the mean and std in a configuration of timm or of an export; None if it has none."""
    mean, std = facts.get("mean"), facts.get("std")
    return None if mean is None or std is None else Normalization(mean=mean, std=std)


@contextlib.contextmanager
def _fetching(what: str, call: str) -> Iterator[None]:
    """Replace the errors inside the block, which libraries and their HTTP clients raise in many kinds."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(
            f"cannot fetch the {what} ({reason}); if there is no network, call {call} on a machine that has one and "
            "copy its cache here (~/.cache/huggingface or ~/.cache/torch), or pass a file"
        ) from None


def fit(
    own: Mapping[str, Tensor], given: TrainedWeights, *, prefix: str | None = None, exceptions: Sequence[str] = ()
) -> tuple[dict[str, Tensor], str]:
    """Find the tensors `own` of an encoder in given weights. Returns them by its names, and a sentence for the log.

    They stand under one beginning of names, such as `state_dict.module.encoder_q.`: the one with most of the encoder's
    names, or `prefix`. A network whose beginning says that it follows another one (momentum, target, encoder_k) counts
    only by `prefix`. `shortcut` means `downsample`, and the numbers of an `nn.Sequential` mean the layers in order.
    Left aside are tensors elsewhere, and classifiers and projectors (`HEADS`).

    Tensors whose names begin with one of `exceptions` are not taken. Raises `UserError` with a list of all others that
    are missing, not known or of another shape, and if several networks fit.
    """
    names, excepted = {_usual(name): name for name in own}, tuple(map(_usual, exceptions))
    wanted = {name: tensor for name, tensor in names.items() if not name.startswith(excepted)}
    found = {_usual(name): tensor for name, tensor in given.tensors.items()}
    layers = list(dict.fromkeys(name.partition(".")[0] for name in names))
    counted = [(_counts(wanted, each), each) for each in (found, _with_named_layers(found, layers))]
    counts, found = max(counted, key=lambda pair: max(pair[0].values(), default=0))
    start = _beginning(counts, given) if prefix is None else f"{prefix.removesuffix('.')}."
    inside = {name.removeprefix(start): tensor for name, tensor in found.items() if name.startswith(start)}
    taken = {own_name: inside[name] for name, own_name in wanted.items() if name in inside}
    problems = {
        "missing": [name for name in wanted.values() if name not in taken and not name.endswith(_COUNTER)],
        "of another shape": [
            f"{name} is {tuple(tensor.shape)} there and {tuple(own[name].shape)} in the encoder"
            for name, tensor in taken.items()
            if tensor.shape != own[name].shape
        ],
        "not known": [
            name
            for name in inside
            if not (name in names or name.partition(".")[0] in HEADS or name.startswith(excepted))
        ],
    }
    if any(problems.values()):
        lists = "; ".join(f"{kind}: {_listed(which)}" for kind, which in problems.items() if which)
        raise UserError(
            f"{given.where} does not fit the encoder: {lists}; set the encoder.kind that was trained, or name in "
            "encoder.weights_except the beginnings of names that are not to be taken, such as [conv1.]"
        )
    left = [name for name in found if not (name.startswith(start) and name.removeprefix(start) in wanted)]
    aside = f"; left aside: {_listed(left)}" if left else ""
    return taken, f"{len(taken)} of {len(own)} tensors from {given.where}{start and f', under {start}'}{aside}"


def _usual(name: str) -> str:
    return name.replace(".shortcut.", ".downsample.")


def _counts(wanted: Collection[str], names: Collection[str]) -> Counter[str]:
    """Return the number of wanted names under each beginning of names."""
    counts: Counter[str] = Counter()
    for name in names:
        rest = name
        while rest:
            if rest in wanted:
                counts[name.removesuffix(rest)] += 1
            rest = rest.partition(".")[2]
    return counts


def _with_named_layers(found: Mapping[str, Tensor], layers: Sequence[str]) -> dict[str, Tensor]:
    """Return the tensors with the numbers of every `nn.Sequential` of that many layers replaced by their names.

    A number counts if tensors have it, so that layers without tensors may be there or not. Further layers are a
    classifier.
    """
    parts = {name: match.groups() for name in found if (match := _NUMBERED.fullmatch(name))}
    numbers: dict[str, set[int]] = defaultdict(set)
    for before, number, _ in parts.values():
        numbers[before].add(int(number))
    named = {}
    for name, tensor in found.items():
        before, number, rest = parts.get(name, ("", "", ""))
        if number and len(numbers[before]) >= len(layers):
            place = sorted(numbers[before]).index(int(number))
            name = f"{before}{[*layers, _CLASSIFIER][min(place, len(layers))]}.{rest}"
        named[name] = tensor
    return named


def _beginning(counts: Mapping[str, int], given: TrainedWeights) -> str:
    """Return the beginning of the trained network. Raises `UserError` if there is none, or more than one."""
    if not counts:
        raise UserError(
            f"{given.where} holds no tensor of the encoder; its names are {_listed(list(given.tensors))}; set the "
            "encoder.kind that was trained"
        )
    best = [start for start, num in counts.items() if num == max(counts.values())]
    trained = [start for start in best if not any(word in start for word in _COPIES)] or best
    if len(trained) > 1:
        raise UserError(
            f"{given.where} holds several networks that fit, under {_listed(trained)}; choose one, such as "
            f"encoder.weights_prefix={trained[0]}"
        )
    return trained[0]


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
