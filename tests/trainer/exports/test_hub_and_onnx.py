"""An encoder goes to the layout of the Hub and to ONNX, from a run or from one's own loop, with equal features."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor, nn

import trainer.exports.encoder
from data_pipeline.core.errors import UserError
from tests.trainer.exports.test_export import CIFAR10, features_of, make_run, own_encoder, pictures
from tests.trainer.reports.made_runs import probe_result
from trainer import load_encoder
from trainer.checkpoint.run_state import DataIdentity
from trainer.export import main
from trainer.exports.encoder import export_onnx, save_encoder, save_pretrained
from trainer.models import Encoder, ResNetConfig, TimmConfig, build_encoder
from trainer.models.encoder import Normalization
from trainer.pretrained import load_modules
from trainer.run_dir import RunDir, write_json

SMALL_VIT = TimmConfig(name="vit_tiny_patch16_224", options={"img_size": 32, "patch_size": 8, "depth": 1}, **CIFAR10)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return make_run(tmp_path_factory.mktemp("run"), steps=(5, 10))


def test_an_encoder_of_ones_own_loop_is_saved_and_loaded(tmp_path: Path) -> None:
    normalization = Normalization(mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))
    encoder = build_encoder(ResNetConfig(kind="resnet10", width=4), normalization=normalization).eval()
    save_encoder(encoder, tmp_path / "mine.safetensors", name="mine", step=7)
    save_pretrained(encoder, tmp_path / "hub", name="mine", step=7)
    for path in (tmp_path / "mine.safetensors", tmp_path / "hub"):
        assert torch.equal(features_of(load_encoder(path), 3), features_of(encoder, 3))
    assert (tmp_path / "hub" / "model.safetensors").read_bytes() == (tmp_path / "mine.safetensors").read_bytes()


def test_a_wrapped_encoder_is_saved_as_the_encoder_itself(tmp_path: Path) -> None:
    encoder = own_encoder()
    wrapped: nn.Module = torch.compile(nn.DataParallel(encoder), backend="eager")  # type: ignore[assignment]
    for name, source in (("plain", encoder), ("wrapped", wrapped)):
        save_pretrained(source, tmp_path / name)
    for file in ("config.json", "README.md", "model.safetensors"):
        assert (tmp_path / "wrapped" / file).read_bytes() == (tmp_path / "plain" / file).read_bytes()


def test_the_card_of_a_run_says_data_settings_steps_and_probes(run_dir: RunDir, tmp_path: Path) -> None:
    for name, title, accuracy in (
        ("base", "picture", 0.8125),
        ("overlay", "digit", 0.25),
        ("base-seed_1", "another", 0.3),
    ):
        result = probe_result(name.partition("-")[0], 10, [accuracy], 2000, title=title)
        write_json(run_dir.probes(10) / f"{name}.json", result)
    save_pretrained(run_dir.path, tmp_path)
    card = (tmp_path / "README.md").read_text()
    front, _, text = card.removeprefix("---\n").partition("\n---\n")
    assert "library_name: feature-dropout" in front
    assert "# tiny-run" in text
    for row in ("| objective | nt_xent |", "| views | expert_image |", "| encoder | resnet10 |", "| steps | 10 of 32 "):
        assert row in text
    assert "| picture | 81.2 | 80.2 | 11.3 | 10.0 | 200 | 2,000 |" in text
    assert "| digit | 25.0 |" in text
    assert "another" not in text
    assert str(run_dir.path) not in text + (tmp_path / "config.json").read_text()
    assert torch.equal(features_of(load_encoder(tmp_path), 3), features_of(load_encoder(run_dir.path), 3))
    assert {path.name for path in tmp_path.iterdir()} == {"README.md", "config.json", "model.safetensors"}


def test_only_a_run_that_reads_no_labels_is_tagged_as_self_supervised(run_dir: RunDir, tmp_path: Path) -> None:
    """Nobody knows how an encoder of one's own loop was trained."""
    supervised = RunDir(shutil.copytree(run_dir.path, tmp_path / "run"))
    write_json(supervised.config, json.loads(run_dir.config.read_text()) | {"objective": {"kind": "supervised"}})
    begun = RunDir(shutil.copytree(run_dir.path, tmp_path / "begun"))  # with weights of others
    config = json.loads(run_dir.config.read_text())
    config["encoder"] |= {"weights": "/data/imagenet.pth", "weights_sha256": "ab" * 32}
    write_json(begun.config, config)
    cases: list[tuple[Any, int]] = [(run_dir, 1), (supervised, 0), (own_encoder(), 0), (begun, 0)]
    for number, (source, more) in enumerate(cases):
        save_pretrained(source, tmp_path / str(number))
        front = (tmp_path / str(number) / "README.md").read_text().split("---\n")[1]
        assert yaml.safe_load(front)["tags"] == ["self-supervised-learning"] * more + ["feature-extraction"]
    assert "| labels in training | read by the objective |" in (tmp_path / "1" / "README.md").read_text()
    assert "| first weights | imagenet.pth, hash abababababab |" in (tmp_path / "3" / "README.md").read_text()


def test_an_earlier_step_and_a_title_can_be_chosen(run_dir: RunDir, tmp_path: Path) -> None:
    save_pretrained(run_dir, tmp_path, step=5, name="My encoder")
    assert "# My encoder" in (tmp_path / "README.md").read_text()
    assert torch.equal(features_of(load_encoder(tmp_path), 3), features_of(load_encoder(run_dir.path, step=5), 3))
    with pytest.raises(UserError, match="leave out step=5"):
        load_encoder(tmp_path, step=5)


def names_of_the_code(directory: Path) -> dict[str, Any]:
    """Run the code of a model card, and return its names."""
    (code,) = [part.partition("```")[0] for part in (directory / "README.md").read_text().split("```python\n")[1:]]
    names: dict[str, Any] = {}
    exec(code.replace("PATH OF THIS DIRECTORY", str(directory)), names)
    return names


def test_the_code_in_the_card_works_and_imports_code_of_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.exports.model_card.is_own", lambda config: True)
    save_pretrained(own_encoder(), tmp_path)
    assert f"import {ResNetConfig.__module__}  #" in (tmp_path / "README.md").read_text()
    assert names_of_the_code(tmp_path)["pooled"].shape == (8, 32)


def test_the_card_of_a_run_shows_its_inputs_and_the_probes_on_its_train_set(
    run_dir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An encoder reads other sizes than its own to worse features, and replaced data are not those of the training."""
    run = RunDir(shutil.copytree(run_dir.path, tmp_path / "run"))
    write_json(run.provenance, {"encoder_input_size": [16, 24]})
    data = DataIdentity(train_manifest_sha256="2" * 64, test_manifest_sha256="1" * 64)
    modules = replace(load_modules(run), trained_on=data)
    monkeypatch.setattr(trainer.exports.encoder, "load_modules", lambda run_dir, step: modules)
    of_data, of_others = (probe_result("base", 10, [0.5], 2000, title=title) for title in ("measured", "replaced"))
    write_json(run.probes(10) / "base.json", of_data | {"train_manifest_sha256": "2" * 64})
    write_json(run.probes(10) / "overlay.json", of_others | {"label": "overlay"})
    save_pretrained(run, tmp_path / "hub")
    card = (tmp_path / "hub" / "README.md").read_text()
    assert "| measured | 50.0 |" in card
    assert "replaced" not in card
    assert names_of_the_code(tmp_path / "hub")["inputs"].shape == (8, 3, 16, 24)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config", [ResNetConfig(kind="resnet18", **CIFAR10), SMALL_VIT], ids=lambda config: config.kind
)
def test_timm_loads_the_directory(config: Any, tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    encoder = own_encoder(config)
    save_pretrained(encoder, tmp_path)
    model = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    with torch.no_grad():
        theirs = model((pictures(3) - encoder.mean_C11) / encoder.std_C11)
    torch.testing.assert_close(theirs, features_of(encoder, 3))
    if config.kind == "timm":
        assert timm.data.resolve_data_config({}, model=model)["input_size"] == (3, 32, 32)
    assert "local-dir:PATH OF THIS DIRECTORY" in (tmp_path / "README.md").read_text()


def run_onnx(path: Path, pictures_BCHW: Tensor) -> Tensor:
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (pooled,) = session.run(["pooled"], {"pictures": np.asarray(pictures_BCHW)})
    return torch.from_numpy(pooled)


@pytest.mark.slow
def test_onnx_is_float32_and_gives_the_same_features_for_any_number_of_pictures(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    encoder = own_encoder(SMALL_VIT).half().train()
    export_onnx(encoder, tmp_path / "encoder.onnx", image_size=32)
    assert encoder.training
    assert next(encoder.parameters()).dtype == torch.float16
    encoder.float().eval()
    for num in (1, 5):
        x = torch.rand(num, 3, 32, 32)
        with torch.no_grad():
            expected = encoder.pooled(x)
        torch.testing.assert_close(run_onnx(tmp_path / "encoder.onnx", x), expected, rtol=1e-4, atol=1e-5)
    assert [path.name for path in tmp_path.iterdir()] == ["encoder.onnx"]


def test_the_commands(run_dir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph takes seconds, and another test makes one."""
    graphs: list[Any] = []
    monkeypatch.setattr(
        "trainer.exports.encoder.export_onnx", lambda run, out, **options: graphs.append((run.path, out, options))
    )
    monkeypatch.setattr(sys, "argv", ["export", str(run_dir.path), "--out", str(tmp_path / "e.onnx")])
    with pytest.raises(UserError, match="--image-size"):
        main()
    for words in (["--out", str(tmp_path / "e.onnx"), "--image-size", "32x48"], ["--hub", str(tmp_path / "hub")]):
        monkeypatch.setattr(sys, "argv", ["export", str(run_dir.path), *words])
        main()
    expected = features_of(load_encoder(run_dir.path), 3)
    assert graphs == [(run_dir.path, tmp_path / "e.onnx", {"image_size": (32, 48), "step": None})]
    assert torch.equal(features_of(load_encoder(tmp_path / "hub"), 3), expected)
    assert json.loads((tmp_path / "hub" / "config.json").read_text())["encoder_export"]["step"] == 10


def test_what_cannot_be_exported_is_refused(run_dir: RunDir, tmp_path: Path) -> None:
    other = Encoder(own_encoder().trunk, nn.Identity(), in_channels=3, normalization=Normalization(**CIFAR10))
    open_encoder = build_encoder(ResNetConfig(kind="resnet10", width=4))
    empty = RunDir(tmp_path / "empty")
    write_json(empty.config, json.loads(run_dir.config.read_text()))
    refused: list[tuple[Callable[[], None], str]] = [
        (lambda: save_encoder(other, tmp_path / "x.safetensors"), "does not come from build_encoder"),
        (lambda: save_encoder(open_encoder, tmp_path / "x.safetensors"), "has no mean and std"),
        (lambda: save_pretrained(empty, tmp_path / "hub"), "has no checkpoint yet"),
        (lambda: save_pretrained(own_encoder(), run_dir.path), "is a run directory"),
    ]
    for action, message in refused:
        with pytest.raises(UserError, match=message):
            action()
    assert {path.name for path in tmp_path.iterdir()} == {"empty"}
