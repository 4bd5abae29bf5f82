"""Take weights that others have trained: read them, find the tensors of an encoder among them by name, load them.

A file may hold mappings inside mappings. The name of a tensor is its path there, such as
`state_dict.module.encoder_q.conv1.weight`. `fit` has the one rule that finds the tensors of an encoder.
"""

from __future__ import annotations

import hashlib
import pickle
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
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

IMAGENET: Final = Normalization(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
# The first parts of the names of classifiers and projectors, which an encoder leaves aside.
_CLASSIFIER: Final = "classifier"
HEADS: Final = frozenset(
    {"fc", "linear", _CLASSIFIER, "head", "last_linear"} | {"projection_head", "projector", "prototypes", "predictor"}
)
_COPIES: Final = ("momentum", "target", "encoder_k")  # words in the names of networks that follow the trained one
_COUNTER: Final = "num_batches_tracked"  # torch before 1.0 did not save it, and no batch norm here reads it
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


def weights_of_timm(name: str, *, in_channels: int = 3, options: Mapping[str, Any] | None = None) -> TrainedWeights:
    """Return the pretrained weights of a timm model, which timm fits to `in_channels` and to its other `options`.

    timm keeps them in the cache of Hugging Face. Raises `UserError` if it has none, or if they cannot be fetched.
    """
    timm = load_timm()
    try:
        with torch.random.fork_rng(devices=[]):
            model = timm.create_model(name, pretrained=True, num_classes=0, in_chans=in_channels, **(options or {}))
    except Exception as error:  # timm, the Hub's client and its HTTP library raise many kinds
        raise _not_fetched(
            f"the weights of timm's {name}", f"timm.create_model({name!r}, pretrained=True)", error
        ) from None
    config = model.pretrained_cfg
    return TrainedWeights(
        f"timm's {name} ({config.get('tag') or 'pretrained'})",
        model.state_dict(),
        normalization_in(config),
        tuple(config["input_size"][-2:]),
    )


def weights_of_torchvision(name: str) -> TrainedWeights:
    """Return weights by their name in torchvision, such as "ResNet18_Weights.IMAGENET1K_V1", which it caches.

    A name of a model, such as "resnet18", means its default weights. Raises `UserError` if there are none of this name,
    or if they cannot be fetched.
    """
    from torchvision import models  # takes as long to import as torch

    try:
        weights = models.get_weight(name) if "." in name else models.get_model_weights(name).DEFAULT
    except (ValueError, KeyError, AttributeError):
        raise UserError(
            f"torchvision has no weights {name}; name them like ResNet18_Weights.IMAGENET1K_V1, as "
            "torchvision.models.list_models() and get_model_weights(MODEL) list them"
        ) from None
    try:
        tensors = weights.get_state_dict(progress=False, check_hash=True)
    except (OSError, RuntimeError) as error:
        call = f"torchvision.models.get_weight('{weights}').get_state_dict()"
        raise _not_fetched(f"torchvision's {weights}", call, error) from None
    transforms = weights.transforms()
    size = (transforms.crop_size * 2)[:2]
    return TrainedWeights(
        f"torchvision's {weights}", tensors, Normalization(mean=transforms.mean, std=transforms.std), size
    )


def normalization_in(config: Mapping[str, Any]) -> Normalization | None:
    """Return the mean and std in a configuration of timm or of an export; None if it has none."""
    mean, std = config.get("mean"), config.get("std")
    return None if mean is None or std is None else Normalization(mean=mean, std=std)


def _not_fetched(what: str, call: str, error: Exception) -> UserError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return UserError(
        f"{what} cannot be had ({reason[:300]}); without a network, call {call} on a machine that has one, copy its "
        "cache here (~/.cache/huggingface or ~/.cache/torch), or pass the file of the weights"
    )


@dataclass(frozen=True)
class Fit:
    """The tensors of an encoder that were found, by their names there, and what is said of it in the log."""

    tensors: Mapping[str, Tensor]
    note: str


def fit(
    own: Mapping[str, Tensor],
    given: TrainedWeights,
    *,
    prefix: str | None = None,
    exceptions: Sequence[str] = (),
) -> Fit:
    """Find the tensors `own` of an encoder in given weights.

    They stand under one beginning of names, such as `state_dict.module.encoder_q.`: the one with most of the encoder's
    names, or `prefix`. A network whose beginning says that it follows another one (momentum, target, encoder_k) counts
    only by `prefix`. `shortcut` means `downsample`, and the numbers of an `nn.Sequential` mean the layers in order.
    Tensors outside that beginning are left aside, and so are classifiers and projectors (`HEADS`).

    Tensors whose names begin with one of `exceptions` are not taken.

    Raises `UserError` with a list of all other tensors that are missing, not known or of another shape, and if several
    networks fit.
    """
    wanted = {_usual(name): name for name in own}
    found = {_usual(name): tensor for name, tensor in given.tensors.items()}
    if prefix is None:
        readings = [found, *_with_numbers_named(found, children=list(dict.fromkeys(map(_first, wanted))))]
        counts = [_count_by_beginning(wanted, reading) for reading in readings]
        most, best = max((max(count.values(), default=0), -number) for number, count in enumerate(counts))
        found = readings[-best]
        start = _beginning([each for each, num in counts[-best].items() if num == most and num], given)
    else:
        start = f"{prefix.removesuffix('.')}." if prefix else ""
    inside = {name.removeprefix(start): tensor for name, tensor in found.items() if name.startswith(start)}
    excepted = tuple(map(_usual, exceptions))
    problems: dict[str, list[str]] = defaultdict(list)
    for name, own_name in wanted.items():
        if name.startswith(excepted):
            continue
        if name not in inside:
            if not name.endswith(_COUNTER):
                problems["missing"].append(own_name)
        elif inside[name].shape != own[own_name].shape:
            shapes = tuple(inside[name].shape), tuple(own[own_name].shape)
            problems["of another shape"].append(f"{own_name} is {shapes[0]} there and {shapes[1]} in the encoder")
    for name in inside:
        if name not in wanted and _first(name) not in HEADS and not name.startswith(excepted):
            problems["not known"].append(name)
    if problems:
        lists = "; ".join(f"{kind}: {_listed(names)}" for kind, names in sorted(problems.items(), reverse=True))
        raise UserError(
            f"{given.where} does not fit the encoder: {lists}; set the encoder.kind that was trained, or name in "
            "encoder.weights_except the beginnings of names that are not to be taken, such as [conv1.]"
        )
    taken = {
        own_name: inside[name] for name, own_name in wanted.items() if name in inside and not name.startswith(excepted)
    }
    is_taken = {start + _usual(own_name) for own_name in taken}
    left = Counter(_outermost(name, start) for name in found if name not in is_taken)
    said = [f"{len(taken)} of {len(own)} tensors from {given.where}", *([f"under {start}"] if start else [])]
    aside = [f"left aside: {_listed([f'{name} ({num})' for name, num in left.items()])}"] if left else []
    first = [name for name in own if name not in taken and not name.endswith(_COUNTER)]
    begins = [f"with first weights of their own: {_listed(first)}"] if first else []
    return Fit(taken, "; ".join([", ".join(said), *aside, *begins]))


def _usual(name: str) -> str:
    return name.replace(".shortcut.", ".downsample.")


def _first(name: str) -> str:
    return name.partition(".")[0]


def _count_by_beginning(wanted: Mapping[str, str], names: Mapping[str, Tensor]) -> Counter[str]:
    """Return the number of wanted names under each beginning of names."""
    counts: Counter[str] = Counter()
    for name in names:
        parts = name.split(".")
        for at in range(len(parts)):
            if ".".join(parts[at:]) in wanted:
                counts["".join(f"{part}." for part in parts[:at])] += 1
    return counts


def _with_numbers_named(found: Mapping[str, Tensor], *, children: list[str]) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors with the numbers of one `nn.Sequential` replaced by the names of as many children.

    A number counts if tensors have it, so that layers without tensors may be there or not. Further layers are a
    classifier.
    """
    numbers: dict[str, set[int]] = defaultdict(set)
    for name in found:
        before, number = _split_at_number(name)
        if number is not None:
            numbers[before].add(number)
    for before, used in numbers.items():
        if len(used) >= len(children):
            named = {number: f"{_CLASSIFIER}.{number}" for number in used}  # what follows the last child
            named |= dict(zip(sorted(used), children, strict=False))
            yield {_renamed(name, before, named): tensor for name, tensor in found.items()}


def _split_at_number(name: str) -> tuple[str, int | None]:
    """Return the part of a name before its first number, and that number."""
    before = ""
    for part in name.split("."):
        if part.isdecimal():
            return before, int(part)
        before += f"{part}."
    return before, None


def _renamed(name: str, before: str, named: Mapping[int, str]) -> str:
    own_before, number = _split_at_number(name)
    if own_before != before or number is None:
        return name
    return before + named[number] + name.removeprefix(f"{before}{number}")


def _beginning(candidates: list[str], given: TrainedWeights) -> str:
    """Return the beginning of the trained network. Raises `UserError` if there is none, or more than one."""
    if not candidates:
        raise UserError(
            f"{given.where} holds no tensor of the encoder; its names are {_listed(list(given.tensors))}; set the "
            "encoder.kind that was trained"
        )
    trained = [each for each in candidates if not any(word in each for word in _COPIES)] or candidates
    if len(trained) > 1:
        raise UserError(
            f"{given.where} holds several networks that fit, under {_listed(trained)}; choose one, such as "
            f"encoder.weights_prefix={trained[0]}"
        )
    return trained[0]


def _outermost(name: str, start: str) -> str:
    """Return a name up to the first part in which it differs from the beginning `start`."""
    parts, of_start = name.split("."), start.split(".")[:-1]
    same = next((at for at, part in enumerate(of_start) if at >= len(parts) or parts[at] != part), len(of_start))
    return ".".join(parts[: same + 1])


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
