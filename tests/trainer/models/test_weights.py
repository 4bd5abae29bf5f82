"""Encoders take the weights of any library's checkpoint, with its own network's features, or say all that differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torchvision
from torch import Tensor, nn

from data_pipeline.core.errors import UserError
from trainer.models import Encoder, ResNetConfig, build_encoder
from trainer.models.weights import TrainedWeights, fit, read_tensors
from trainer.pretrained import load_start, open_network

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)
PICTURES = torch.rand(3, 3, 64, 64, generator=torch.Generator().manual_seed(1))
SMALL = PICTURES[..., :32, :32]


def moved(network: Any) -> Any:
    """Return a network whose batch norms have moved, in eval mode."""
    with torch.no_grad():
        network.train()(SMALL)
    return network.eval()


def resnet18() -> Any:
    return moved(torchvision.models.resnet18())


def begun_with(path: Path, *, kind: Any = "resnet18") -> Encoder:
    encoder = build_encoder(ResNetConfig(kind=kind, mean=MEAN, std=STD, weights=str(path)))
    load_start(encoder)
    return encoder.eval()


def with_prefixes(state: Mapping[str, Tensor], *prefixes: str) -> dict[str, Tensor]:
    return {prefix + name: tensor for prefix in prefixes for name, tensor in state.items()}


def as_sequence(network: nn.Module) -> nn.Sequential:
    return nn.Sequential(*list(network.children())[:-1])


def moco_of_lightly(network: nn.Module) -> dict[str, Any]:
    """The module of lightly's tutorials, as Lightning saves it, with numbers for layers and a momentum copy."""
    heads = pytest.importorskip("lightly.models.modules.heads")
    parts = {
        "backbone_momentum": as_sequence(torchvision.models.resnet18()),
        "backbone": as_sequence(network),
        "projection_head": heads.MoCoProjectionHead(512, 64, 8),
    }
    return {"epoch": 3, "state_dict": nn.ModuleDict(parts).state_dict(), "hyper_parameters": {"lr": 0.1}}


FILES: dict[str, tuple[str, Callable[[nn.Module], Mapping[str, Any]]]] = {
    "torchvision": ("a.pth", lambda net: net.state_dict()),
    "safetensors": ("a.safetensors", lambda net: net.state_dict()),
    "torch before 1.0": (
        "a.pth",
        lambda net: {name: x for name, x in net.state_dict().items() if not name.endswith("num_batches_tracked")},
    ),
    "lightly": ("a.ckpt", moco_of_lightly),
    "MoCo": (
        "a.pth.tar",
        lambda net: {
            "arch": "resnet18",
            "state_dict": with_prefixes(net.state_dict(), "module.encoder_q.")
            | with_prefixes(torchvision.models.resnet18().state_dict(), "module.encoder_k.")
            | {"module.queue": torch.zeros(8, 4)},
        },
    ),
    "solo-learn": (
        "a.ckpt",
        lambda net: {
            "state_dict": with_prefixes(torchvision.models.resnet18().state_dict(), "momentum_backbone.")
            | with_prefixes(net.state_dict(), "backbone.")
            | {"projector.0.weight": torch.zeros(4, 4)}
        },
    ),
    "SwAV": ("a.pth", lambda net: with_prefixes(net.state_dict(), "module.") | {"module.prototypes.weight": PICTURES}),
    "numbers, with an optimizer": (
        "a.pt",
        lambda net: {"model": nn.Sequential(*net.children()).state_dict(), "optimizer": {"state": {0: {"x": STD}}}},
    ),
}


@pytest.mark.parametrize(("name", "contents"), FILES.values(), ids=FILES)
def test_the_checkpoint_of_a_library_gives_the_features_of_its_network(
    name: str, contents: Callable[[nn.Module], Any], tmp_path: Path
) -> None:
    network, path = resnet18(), tmp_path / name
    save = safetensors.torch.save_file if path.suffix == ".safetensors" else torch.save
    save(contents(network), path)
    encoder = begun_with(path)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (MEAN, STD))
    with torch.no_grad():
        expected = as_sequence(network)((PICTURES - mean) / std).flatten(1)
        torch.testing.assert_close(encoder.pooled(PICTURES), expected, rtol=0, atol=0)


def test_a_small_resnet_of_lightly_fits_the_small_form(tmp_path: Path) -> None:
    """Its shortcuts have another name than torchvision's, and it has no layers for ReLU and pooling."""
    generator = pytest.importorskip("lightly.models").ResNetGenerator("resnet-18")
    torch.save(as_sequence(moved(generator)).state_dict(), tmp_path / "a.pt")
    encoder = begun_with(tmp_path / "a.pt", kind="resnet18_small")
    generator.linear = nn.Identity()
    with torch.no_grad():
        x = encoder.normalise(SMALL)  # its forward pass pools a map of 4 x 4
        torch.testing.assert_close(encoder.pooled(SMALL), generator(x))


def test_every_tensor_that_does_not_fit_is_said() -> None:
    own = ResNetConfig(kind="resnet18_small").build_trunk().state_dict()
    given = dict(torchvision.models.resnet18().state_dict())
    del given["bn1.running_mean"]
    given["of_another.weight"] = torch.zeros(1)
    weights = TrainedWeights("x.pt", given)
    with pytest.raises(UserError) as caught:
        fit(own, weights)
    for said in (
        "not known: of_another.weight;",
        "of another shape: conv1.weight is (64, 3, 7, 7) there and (64, 3, 3, 3) in the encoder;",
        "missing: bn1.running_mean;",
        "encoder.weights_except",
    ):
        assert said in str(caught.value)
    taken, said = fit(own, weights, exceptions=("conv1.", "bn1.", "of_another."))
    assert set(own) - set(taken) == {"conv1.weight", *(name for name in own if name.startswith("bn1."))}
    aside = "conv1.weight, bn1.weight, bn1.bias, bn1.running_var, bn1.num_batches_tracked, fc.weight, fc.bias"
    assert said == f"114 of 120 tensors from x.pt; left aside: {aside}, of_another.weight"


def test_two_networks_need_a_choice() -> None:
    own = ResNetConfig(kind="resnet10", width=2).build_trunk().state_dict()
    teacher = {name: tensor + 1 for name, tensor in own.items()}
    both = with_prefixes(own, "student.backbone.") | with_prefixes(teacher, "teacher.backbone.")
    with pytest.raises(UserError, match=r"several networks that fit, under student\.backbone\., teacher\.backbone\.;"):
        fit(own, TrainedWeights("x.pt", both))
    taken, _ = fit(own, TrainedWeights("x.pt", both), prefix="teacher.backbone")
    assert torch.equal(taken["conv1.weight"], teacher["conv1.weight"])


def test_files_that_are_no_weights_are_refused(tmp_path: Path) -> None:
    paths = {name: tmp_path / name for name in ("network.pt", "text.pth", "text.safetensors", "missing.pt", "empty.pt")}
    torch.save(nn.Linear(2, 2), paths["network.pt"])
    for name in ("text.pth", "text.safetensors"):
        paths[name].write_text("no weights")
    torch.save({"epoch": 3}, paths["empty.pt"])
    for name, message in {
        "network.pt": r"holds more than tensors, torch\.nn\.modules\.linear\.Linear, and reading it would run code",
        "text.pth": "text.pth",
        "text.safetensors": "cannot read weights from .*text.safetensors",
        "missing.pt": "cannot read weights from .*missing.pt",
    }.items():
        with pytest.raises(UserError, match=message):
            read_tensors(paths[name])
    with pytest.raises(UserError, match="holds no tensor of the encoder"):
        begun_with(paths["empty.pt"])


def test_the_hash_is_that_of_the_tensors_with_their_names() -> None:
    one = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor(3, dtype=torch.int64)}
    same = {"b": one["b"].clone(), "a": torch.tensor([1.0, 0.0, 2.0])[::2]}
    hashes = [
        TrainedWeights("", each).sha256
        for each in (one, same, one | {"a": -one["a"]}, {"c": one["a"], "b": one["b"]}, one | {"a": one["a"].half()})
    ]
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 4


def test_torchvisions_weights_come_with_their_normalisation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file in torch's cache holds drawn weights. Nothing is downloaded."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    weights = torchvision.models.ResNet18_Weights.IMAGENET1K_V1
    network, transforms = resnet18(), weights.transforms()
    path = tmp_path / "hub" / "checkpoints" / Path(weights.url).name
    path.parent.mkdir(parents=True)
    torch.save(network.state_dict(), path)
    found = open_network("torchvision:ResNet18_Weights.IMAGENET1K_V1")
    assert_resizes_and_normalises(found, as_sequence(network), transforms.mean, transforms.std, size=224)
    with pytest.raises(UserError, match=r"cannot fetch the weights torchvision:ResNet18_Weights\.MINE"):
        open_network("torchvision:ResNet18_Weights.MINE")


def test_timms_weights_come_with_their_normalisation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file in the cache of Hugging Face holds drawn weights. Nothing is downloaded."""
    network = moved(pytest.importorskip("timm").create_model("resnet10t.c3_in1k"))
    repository = tmp_path / "models--timm--resnet10t.c3_in1k"
    for directory in ("snapshots/1", "refs"):
        (repository / directory).mkdir(parents=True)
    safetensors.torch.save_file(network.state_dict(), repository / "snapshots" / "1" / "model.safetensors")
    (repository / "refs" / "main").write_text("1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    facts = network.pretrained_cfg
    found = open_network("timm:resnet10t.c3_in1k")
    network.reset_classifier(0)
    assert_resizes_and_normalises(found, network, facts["mean"], facts["std"], size=facts["input_size"][-1])
    with pytest.raises(UserError, match=r"cannot fetch the weights of timm's resnet18\.a1_in1k .* copy its cache"):
        open_network("timm:resnet18.a1_in1k")


def assert_resizes_and_normalises(found: nn.Module, network: nn.Module, mean: Any, std: Any, *, size: int) -> None:
    pictures = nn.functional.interpolate(PICTURES, (size, size), mode="bilinear", antialias=True)
    with torch.no_grad():
        expected = network(torchvision.transforms.functional.normalize(pictures, mean, std)).flatten(1)
        for given in (PICTURES, pictures):
            torch.testing.assert_close(found(given), expected)
