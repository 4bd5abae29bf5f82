"""Every block of library.md, coming-from.md and the README runs as a user would run it, and the notebook does too."""

from __future__ import annotations

import functools
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import matplotlib.pyplot as plt
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from tests.gloo import run_ranks
from tests.real_data import REPOSITORY
from tests.tiny_data import write_tiny_pair
from tests.trainer.exports.test_export import make_run

NOTEBOOK = REPOSITORY / "docs" / "what-a-viewmaker-drops.ipynb"
FEWER = {'("train", 300), ("test", 100)': '("train", 12), ("test", 8)', "num_steps = 120": "num_steps = 10"}
FEWER |= {"global_batch_size=48": "global_batch_size=12", "num_epochs=30": "num_epochs=2"}


def cheaper(block: str) -> str:
    """Return a block with narrower networks, fewer steps and shorter probes."""
    narrow = block.replace('kind="resnet10"', 'kind="resnet10", width=8').replace("end_step=10,", "end_step=2,")
    return narrow.replace("num_epochs=30", "num_epochs=2")


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (REPOSITORY / page).read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as the pages assume it: a dataset, and a run."""
    directory = tmp_path_factory.mktemp("library")
    write_tiny_pair(directory / "data" / "photos", num_train=96, num_test=48, overlay="online")
    make_run(directory / "runs" / "mine", steps=(5,))
    (directory / "demo").mkdir()
    (directory / "demo" / "viewmaker").symlink_to(directory / "runs" / "mine")
    (directory / "demo" / "data").symlink_to(directory / "data" / "photos")
    return directory


@pytest.mark.slow
def test_every_block_of_the_page_runs_in_turn(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for ddp.py, which other tests run."""
    monkeypatch.chdir(directory)
    names: dict[str, Any] = {"__name__": "library"}
    for number, block in enumerate(blocks("docs/library.md")):
        assert "DrawKeys(" not in block  # keys made by hand lack the step, which some draws share
        if block.startswith("# ddp.py"):
            continue
        if "onnx" in block:
            pytest.importorskip("onnxscript")
        if "lightning" in block:
            pytest.importorskip("pytorch_lightning")
        exec(compile(cheaper(block), f"docs/library.md, block {number}", "exec"), names)
        if "for label, accuracy" in block:
            assert set(names["found"]) == {"base", "overlay"}
    assert names["output"].loss.isfinite()
    assert names["module"].global_step == 3
    assert names["trainer"].global_step == 9
    assert [batch.epoch for batch in names["stream"]] == [0] * 3 + [1] * 3 + [2] * 3


@pytest.mark.slow
def test_the_block_of_the_readme_runs(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(directory)
    (block,) = blocks("README.md")
    assert len(block.splitlines()) <= 20
    names: dict[str, Any] = {}
    exec(block, names)
    assert names["loss"].isfinite()


@pytest.mark.slow
def test_every_block_for_users_of_other_libraries_runs(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of lightly too, on a folder of pictures; and both losses give the same number."""
    pytest.importorskip("lightly")
    monkeypatch.chdir(directory)
    (directory / "photos/train/kind").mkdir(parents=True)
    for number in range(32):
        Image.new("RGB", (32, 32), (8 * number, 0, 0)).save(directory / f"photos/train/kind/{number}.png")
    torch.manual_seed(0)
    weight = torch.randn(3 * 32 * 32, 16)
    names: dict[str, Any] = {"model": lambda pictures: pictures.flatten(1) @ weight}
    for block in blocks("docs/coming-from.md"):
        exec(cheaper(block), names)
    assert names["loss"].isfinite()
    assert {"base", "overlay"} == set(names["found"])
    z_a, z_b = names["model"](names["a"]), names["model"](names["b"])
    assert names["ours"] == pytest.approx(names["criterion"](z_a, z_b).item(), rel=1e-5)


def train_ddp(directory: str) -> dict[str, Tensor]:
    """Run ddp.py in this process group (alone without one), and return the weights."""
    (script,) = [block for block in blocks("docs/library.md") if block.startswith("# ddp.py")]
    before = Path.cwd()
    os.chdir(directory)
    torch.set_default_dtype(
        torch.float64
    )  # in float32 the two would part at the first ReLU that rounding pushes over 0
    try:
        names: dict[str, Any] = {}
        with mock.patch("torch.distributed.init_process_group"):
            if not torch.distributed.is_initialized():

                def alone(module: nn.Module) -> nn.Module:
                    return module

                with mock.patch("torch.nn.parallel.DistributedDataParallel", alone):
                    exec(cheaper(script), names)
            else:
                exec(cheaper(script), names)
    finally:
        torch.set_default_dtype(torch.float32)
        os.chdir(before)
    return {name.removeprefix("module."): tensor for name, tensor in names["encoder"].state_dict().items()}


@pytest.mark.ranks
def test_two_ranks_train_as_one_process(directory: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        alone = train_ddp(str(directory))
    on_ranks = run_ranks(train_ddp, 2, str(directory))
    for name, expected in alone.items():
        assert torch.equal(on_ranks[0][name], on_ranks[1][name]), name
        torch.testing.assert_close(on_ranks[0][name], expected, rtol=1e-6, atol=1e-9, msg=name)


@pytest.mark.slow
def test_the_notebook_runs_and_keeps_its_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)  # which is read again
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    sources = ["".join(cell["source"]) for cell in cells]
    for long in FEWER:
        assert sum(long in source for source in sources) == 1, long
    names: dict[str, Any] = {"__name__": "notebook"}
    for source, cell in zip(sources, cells, strict=True):
        exec(functools.reduce(lambda text, change: text.replace(*change), FEWER.items(), source), names)
        kept = sum("image/png" in output.get("data", {}) for output in cell["outputs"])
        assert len(plt.get_fignums()) == kept, "renew the outputs: jupyter execute --inplace " + str(NOTEBOOK)
        plt.close("all")
    assert "in the last ten" in capsys.readouterr().out  # the change on the digit, beside the loss
    assert sum("image/png" in str(cell["outputs"]) for cell in cells) == 3
