"""`probe(encoder, train, test)`: any module, any dataset; the accuracies are those of the command."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset, TensorDataset

from data_pipeline.core.errors import UserError
from tests.tiny_data import share_sources, write_tiny_dataset, write_tiny_pair
from trainer.models import Encoder, ResNetConfig, build_encoder
from trainer.probes.any_encoder import Accuracy, probe
from trainer.probes.features import TRAIN_DRAW, read_pictures
from trainer.probes.fitting import fit
from trainer.probes.linear import ProbeConfig, accuracy
from trainer.probes.targets import label_targets

QUICK = ProbeConfig(views="none", num_epochs=5, batch_size=16, learning_rate=0.1)


class Halves(nn.Module):
    """The mean brightness of the top and of the bottom half: it shows everything that the pictures have."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []

    def forward(self, x_BCHW: Tensor) -> Tensor:
        self.calls.append(len(x_BCHW))
        top, bottom = x_BCHW.mean(1).chunk(2, dim=1)
        return torch.stack([top.mean((1, 2)), bottom.mean((1, 2))], dim=1) * 10


def resnet() -> Encoder:
    torch.manual_seed(0)
    return build_encoder(ResNetConfig(kind="resnet10", width=4, mean=(0.5,) * 3, std=(0.2,) * 3))


class Pairs(Dataset[Any]):
    """Pictures whose top half is dark or bright, class 0 or 1; `give` makes the items."""

    def __init__(self, num: int, give: Any, *, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.label_N = torch.randint(2, (num,), generator=draw)
        self.pictures_NCHW = torch.rand(num, 3, 8, 8, generator=draw) / 4
        self.pictures_NCHW[:, :, :4] += 0.5 * self.label_N[:, None, None, None]
        self.give = give

    def __len__(self) -> int:
        return len(self.label_N)

    def __getitem__(self, number: int) -> Any:
        if number >= len(self):
            raise IndexError
        return self.give(self.pictures_NCHW[number], int(self.label_N[number]))


def plain(picture: Tensor, label: int) -> tuple[Tensor, int]:
    return picture, label


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_pair(tmp_path_factory.mktemp("data") / "tiny", num_train=48, num_test=24)


def test_the_accuracies_are_those_of_the_command(tmp_path: Path) -> None:
    data = write_tiny_pair(tmp_path / "data", num_train=64, num_test=32, overlay="online")
    encoder = resnet().eval()
    train, test = read_pictures(data / "train", draw=TRAIN_DRAW), read_pictures(data / "test")
    fitted = fit(
        encoder,
        view_policy=lambda x, keys, masks: x,
        train=train,
        test=test,
        targets=label_targets(train, test),
        config=QUICK,
        device=torch.device("cpu"),
    )
    found = probe(encoder, data / "train", str(data / "test"), config=QUICK)
    chance = {"base": 1 / 2, "overlay": 1 / len(train.class_names("overlay"))}
    assert found == {
        name: Accuracy(
            one.linear.accuracy, accuracy(one.predicted["knn"], one.target.test_N), chance[name], one.num_neighbors
        )
        for name, one in fitted.items()
    }


def test_each_picture_is_encoded_once_and_the_module_is_not_changed(tiny: Path) -> None:
    encoder = Halves().train()
    state = torch.get_rng_state()
    found = probe(encoder, tiny / "train", tiny / "test", config=QUICK, batch_size=40)
    assert encoder.calls == [40, 8, 24]
    assert encoder.training
    assert torch.equal(torch.get_rng_state(), state)
    assert set(found) == {"base", "overlay"}
    assert found["base"].knn > 0.9
    assert found["base"].chance == 0.5


class WithDropout(nn.Module):
    """A module whose method reads `training` without a call of the module."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder

    def embed(self, x_BCHW: Tensor) -> Tensor:
        return functional.dropout(self.encoder.pooled(x_BCHW), training=self.training)


def test_a_method_is_probed_with_its_module_in_eval_mode_and_changes_nothing(tiny: Path) -> None:
    encoder = resnet().train()
    encoder.get_submodule("trunk.layer1").eval()  # as a part that a user has frozen
    before, modes = copy.deepcopy(encoder.state_dict()), [part.training for part in encoder.modules()]
    found = probe(WithDropout(encoder).embed, tiny / "train", tiny / "test", config=QUICK)
    assert all(torch.equal(value, before[name]) for name, value in encoder.state_dict().items())
    assert [part.training for part in encoder.modules()] == modes
    encoder.eval()
    assert found == probe(lambda x_BCHW: encoder.pooled(x_BCHW), tiny / "train", tiny / "test", config=QUICK)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda module: AveragedModel(module),
        lambda module: torch.compile(nn.DataParallel(module), backend="eager"),
    ],
    ids=["AveragedModel", "compile of DataParallel"],
)
def test_an_encoder_in_a_wrapper_of_torch_is_probed_as_without(wrap: Callable[[nn.Module], Any], tiny: Path) -> None:
    encoder = resnet()
    expected = probe(encoder, tiny / "train", tiny / "test", config=QUICK)
    assert probe(wrap(encoder), tiny / "train", tiny / "test", config=QUICK) == expected
    assert probe(wrap(Halves()), tiny / "train", tiny / "test", config=QUICK)["base"].knn > 0.9


@pytest.mark.parametrize("kind", ["dataset", "loader", "uint8", "named", "arrays"])
def test_data_of_others_in_every_form(kind: str) -> None:
    train, test = Pairs(64, plain), Pairs(32, plain, seed=1)

    def in_form(data: Pairs) -> Any:
        match kind:
            case "loader":
                return DataLoader(data, batch_size=20)
            case "uint8":
                return TensorDataset((data.pictures_NCHW * 255).byte(), data.label_N)
            case "arrays":
                return data.pictures_NCHW.numpy(), data.label_N.numpy()
            case "named":
                return Pairs(len(data), lambda x, y: (x, {"bright": y, "other": 0}), seed=0 if data is train else 1)
        return data

    state = torch.get_rng_state()
    found = probe(Halves(), in_form(train), in_form(test), config=QUICK.model_copy(update={"num_epochs": 20}))
    assert kind == "loader" or torch.equal(torch.get_rng_state(), state)
    assert set(found) == ({"bright", "other"} if kind == "named" else {"label"})
    smallest = int(train.label_N.bincount().min())
    assert next(iter(found.values())) == Accuracy(linear=1.0, knn=1.0, chance=0.5, num_neighbors=smallest)


@pytest.mark.parametrize("context", [lambda: torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode])
def test_the_context_around_a_probe_has_no_effect(context: Any, tiny: Path) -> None:
    encoder = resnet()
    expected = probe(encoder, tiny / "train", tiny / "test", config=QUICK)
    with context():
        assert probe(encoder, tiny / "train", tiny / "test", config=QUICK) == expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_module_is_probed_in_the_precision_of_its_parameters(dtype: torch.dtype) -> None:
    """The accuracies are those of its features, computed by hand in that precision."""
    config = QUICK.model_copy(update={"num_epochs": 2})
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randint(256, (48, 3, 4, 4), generator=generator, dtype=torch.uint8)
    classes = torch.arange(48) % 3
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(48, 8)).to(dtype)

    def by_hand(x_BCHW: Tensor) -> Tensor:
        features_BF: Tensor = encoder(x_BCHW.to(dtype))
        return features_BF.float()

    train, test = TensorDataset(pictures[:32], classes[:32]), TensorDataset(pictures[32:], classes[32:])
    assert probe(encoder, train, test, config=config) == probe(by_hand, train, test, config=config)


def test_samples_without_a_label_take_no_part_in_its_accuracy() -> None:
    """As the unlabelled pictures of STL-10, whose label is -1."""
    train, test = Pairs(64, plain), Pairs(32, plain, seed=1)
    for data in (train, test):
        data.label_N[::3] = -1
    found = probe(Halves(), train, test, config=QUICK.model_copy(update={"num_epochs": 20, "num_neighbors": 3}))
    assert found == {"label": Accuracy(linear=1.0, knn=1.0, chance=0.5, num_neighbors=3)}
    test.label_N[:] = -1
    with pytest.raises(UserError, match="none of the test samples has label_label"):
        probe(Halves(), train, test, config=QUICK)


def test_chance_counts_the_classes_that_there_are() -> None:
    """As labels that begin at 1, of which a class 0 has no sample."""
    train, test = Pairs(64, lambda x, y: (x, y + 1)), Pairs(32, lambda x, y: (x, y + 1), seed=1)
    assert probe(Halves(), train, test, config=QUICK)["label"].chance == 0.5


def fixed(shape: tuple[int, ...]) -> nn.Module:
    """A module that returns zeros of (B, *shape)."""

    class Fixed(nn.Module):
        def forward(self, x_BCHW: Tensor) -> Tensor:
            return torch.zeros(len(x_BCHW), *shape)

    return Fixed()


@pytest.mark.parametrize(
    ("encoder", "train", "test", "message"),
    [
        (Halves(), Pairs(8, lambda x, y: (x, float(y))), Pairs(8, plain), "label 'label' of the train set is"),
        (Halves(), Pairs(8, lambda x, y: (x, {"a": y})), Pairs(8, plain), "both need a"),
        (Halves(), Pairs(8, plain), Pairs(8, lambda x, y: (x, 7)), "classes of label 'label' that"),
        (lambda x: x.flatten(1) * torch.nan, Pairs(8, plain), Pairs(8, plain), "not all finite"),
        (fixed((5, 4, 4)), Pairs(8, plain), Pairs(8, plain), r"returns \(8, 5, 4, 4\) for 8 pictures"),
        (
            resnet(),
            Pairs(8, lambda x, y: (x * 255, y)),
            Pairs(8, plain),
            r"pictures must be in \[0, 1\], got values from",
        ),
    ],
)
def test_what_cannot_be_probed_is_refused(encoder: Any, train: Any, test: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        probe(encoder, train, test, config=QUICK)


def test_a_test_set_of_train_pictures_is_refused_unless_the_config_allows_it(
    tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UserError, match=r"48 of the 48 test samples of .*train \(100 %\).*probe.allow_shared"):
        probe(Halves(), tiny / "train", str(tiny / "train"), config=QUICK)
    data = share_sources(tmp_path / "data", num_test=50, num_shared=4)
    assert set(probe(Halves(), data / "train", data / "test", config=QUICK.model_copy(update={"allow_shared": 0.08})))
    assert "4 of the 50 test samples" in caplog.text


@pytest.mark.parametrize("kind", [tuple, lambda data: TensorDataset(*data), lambda data: list(zip(*data, strict=True))])
def test_test_samples_of_others_that_are_train_samples_are_refused(kind: Any) -> None:
    train, test = Pairs(40, plain), Pairs(20, plain, seed=1)
    test.pictures_NCHW[3:5] = train.pictures_NCHW[[30, 7]]
    train_set, test_set = (kind((data.pictures_NCHW, data.label_N)) for data in (train, test))
    with pytest.raises(UserError, match="2 of the 20 test samples are in the train set too"):
        probe(Halves(), train_set, test_set, config=QUICK)
    assert probe(Halves(), train_set, test_set, config=QUICK.model_copy(update={"allow_shared": 0.1}))


def test_train_and_test_inputs_on_other_scales_are_told(caplog: pytest.LogCaptureFixture) -> None:
    probe(Halves(), Pairs(40, plain), Pairs(20, plain, seed=1), config=QUICK)
    assert "standard deviation" not in caplog.text
    probe(Halves(), Pairs(40, lambda x, y: ((x - 0.5) / 0.25, y)), Pairs(20, plain, seed=1), config=QUICK)
    assert "standard deviation" in caplog.text


def test_datasets_that_do_not_fit_each_other_are_refused(
    tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = write_tiny_dataset(tmp_path / "other", num_samples=32, seed=2, overlay="none", split="test")
    assert list(probe(Halves(), tiny / "train", other, config=QUICK)) == ["base"]
    assert "all have one class, or it is a number: label_over" in caplog.text
    with pytest.raises(UserError, match="have no label_overlay of two"):
        probe(Halves(), tiny / "train", other, config=QUICK.model_copy(update={"labels": ("overlay",)}))
    chosen = QUICK.model_copy(update={"labels": ("overlay",)})
    assert set(probe(Halves(), tiny / "train", tiny / "test", config=chosen)) == {"overlay"}
