from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from sklearn.metrics import confusion_matrix
from torch import Tensor

from configs import debug
from data_pipeline.building.build import build_dataset
from data_pipeline.core.errors import UserError
from tests.gloo import run_ranks
from tests.tiny_data import share_sources, write_tiny_pair
from trainer.checkpoint.files import write_files
from trainer.config import RunConfig
from trainer.modules import build_modules
from trainer.pretrained import load_modules
from trainer.probe import main
from trainer.probed_runs.readout import majority_share, read_out
from trainer.probes import features
from trainer.probes.any_encoder import probe as probe_any
from trainer.probes.features import read_pictures
from trainer.probes.heads import read_heads
from trainer.probes.linear import ProbeConfig, Target, accuracy
from trainer.probes.result import read_result, unpack_right
from trainer.run_dir import RunDir, steps_in, write_json


def make_run(directory: Path, data: Path, **settings: Any) -> RunDir:
    """Make a run directory with a config and a checkpoint of step 10: the untrained encoder with doubled weights."""
    config = debug.image().model_dump() | settings
    config["data"] |= {"train_dir": str(data / "train"), "test_dir": str(data / "test")}
    run_dir = RunDir(directory)
    run_dir.path.mkdir(parents=True)
    run_dir.config.write_text(json.dumps(config))
    state = build_modules(RunConfig.model_validate(config)).encoder.state_dict()
    write_checkpoint(run_dir, 10, {name: 2 * tensor for name, tensor in state.items()})
    return run_dir


def write_checkpoint(run_dir: RunDir, step: int, encoder: Mapping[str, Tensor]) -> None:
    run_dir.checkpoint(step).mkdir(parents=True, exist_ok=True)
    write_files(run_dir.checkpoint(step), step=step, states={"encoder": encoder})
    run_dir.latest.write_text(f"step_{step:08d}\n")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_pair(tmp_path_factory.mktemp("data"), num_train=53, num_test=41)


def call(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["probe", *map(str, arguments)])
    main()


@dataclass(frozen=True)
class Probed:
    """A run whose checkpoint and untrained encoder were probed, and what the two commands printed."""

    run_dir: RunDir
    printed: str


@pytest.fixture(scope="module")
def probed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Probed:
    """Tests read it; one that writes copies it."""
    run_dir = make_run(tmp_path_factory.mktemp("probed") / "run", data)
    checkpoint = (run_dir.checkpoint(10) / "encoder.safetensors").read_bytes()
    torch.manual_seed(1)
    with pytest.MonkeyPatch.context() as monkeypatch, contextlib.redirect_stdout(io.StringIO()) as printed:
        call(monkeypatch, run_dir.path)
        call(monkeypatch, run_dir.path, "--step", 0)
    assert (run_dir.checkpoint(10) / "encoder.safetensors").read_bytes() == checkpoint
    return Probed(run_dir, printed.getvalue())


@pytest.mark.slow
def test_writes_both_labels_of_the_newest_checkpoint_and_of_the_untrained_encoder(data: Path, probed: Probed) -> None:
    run_dir = probed.run_dir
    assert steps_in(run_dir.all_probes) == [0, 10]
    for step in (0, 10):
        base, overlay = (read_result(run_dir.probes(step) / f"{name}.json") for name in ("base", "overlay"))
        assert (base.label, overlay.label) == ("base", "overlay")
        assert (base.class_names, overlay.class_names) == (("dark", "bright"), ("low", "middle", "high"))
        assert (base.chance, overlay.chance) == (1 / 2, 1 / 3)
        for result in (base, overlay):
            assert (result.num_train, result.num_test, result.checkpoint_step) == (53, 41, step)
            assert result.probe_config == debug.image().probe
            assert result.num_shared == 0
            assert result.test_manifest_sha256 == read_pictures(data / "test").manifest.sha256
            assert (result.linear.accuracy * 41) == pytest.approx(round(result.linear.accuracy * 41))
    last = probed.printed.strip().splitlines()
    assert last[-1] == str(run_dir.probes(0))
    shown = read_result(run_dir.probes(0) / "overlay.json")
    assert last[-2].startswith("label_overlay ")
    assert f"{100 * shown.linear.accuracy:.1f}" in last[-2]
    assert f"{100 * shown.knn.accuracy:.1f}" in last[-2]


@pytest.mark.slow
def test_a_study_is_probed_at_once_with_its_untrained_encoders(
    data: Path, probed: Probed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = {"probe": {"num_epochs": 1, "views": "none"}}
    other, run = make_run(tmp_path / "study" / "a", data, **quick), make_run(tmp_path / "study" / "b", data)
    call(monkeypatch, tmp_path / "study", "--untrained")
    assert steps_in(other.all_probes) == [0, 10]
    for step in (0, 10):
        for label in ("base", "overlay"):
            expected, found = (
                read_result(each.probes(step) / f"{label}.json").model_dump(exclude={"seconds"})
                for each in (probed.run_dir, run)
            )
            assert found == expected
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty is not a run directory"):
        call(monkeypatch, tmp_path / "empty")


@pytest.mark.slow
def test_real_players_come_out_as_they_went_in(data: Path) -> None:
    """Also if the copy that is fitted moves its running statistics."""
    modules = build_modules(debug.viewmaker())
    for module in modules.trained_modules.values():
        module.train()
    before = {name: copy.deepcopy(module.state_dict()) for name, module in modules.trained_modules.items()}
    train, test = read_pictures(data / "train"), read_pictures(data / "test")
    config = modules.config.probe.model_copy(update={"batch_norm": "train", "num_epochs": 2})
    cpu = torch.device("cpu")
    read_out(modules.encoder, modules.view_policy, train, test, config, cpu, step=0, facts={})
    for name, module in modules.trained_modules.items():
        assert all(part.training for part in module.modules())
        assert all(parameter.requires_grad and parameter.grad is None for parameter in module.parameters())
        for key, tensor in module.state_dict().items():
            assert torch.equal(tensor, before[name][key]), f"{name}.{key}"


@pytest.mark.slow
def test_the_heads_that_are_kept_score_what_was_reported(data: Path, probed: Probed) -> None:
    run_dir = probed.run_dir
    heads, test = read_heads(run_dir.probes(0) / "heads.safetensors"), read_pictures(data / "test")
    encoder = build_modules(debug.image()).encoder.eval()
    with torch.no_grad():
        features_NF = encoder.features(test.images(torch.arange(len(test))) / 255)
    for space, head in heads.by_label.items():
        result = read_result(run_dir.probes(0) / f"{space}.json")
        assert accuracy(head.classes(features_NF), test.by_label[space]) == result.linear.accuracy
        right_N = unpack_right(result.right_samples["linear"], num_test=result.num_test)
        assert right_N is not None
        assert right_N.tolist() == (head.classes(features_NF) == test.by_label[space]).tolist()
        expected_KK = confusion_matrix(
            test.by_label[space], head.classes(features_NF), labels=range(head.bias_K.numel())
        )
        counts = {(right, read): num for right, read, num in result.confusion["linear"]}
        assert counts == {place: num for place, num in np.ndenumerate(expected_KK) if num}
        assert sum(num for *_, num in result.confusion["knn"]) == len(test)
    assert list(heads.by_label) == ["base", "overlay"]
    assert heads.made_by.startswith("probe with num_epochs 5, batch_size 128, ")
    assert "online" not in heads.made_by
    assert "shared" not in heads.made_by
    assert heads.train_manifest_sha256 == read_pictures(data / "train").manifest.sha256
    tensors = safetensors.torch.load_file(run_dir.probes(0) / "heads.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "head/base/weight": (2, features_NF.shape[1]),
        "head/base/bias": (2,),
        "head/overlay/weight": (3, features_NF.shape[1]),
        "head/overlay/bias": (3,),
    }


@pytest.mark.slow
def test_one_label_alone_is_the_same_and_leaves_the_other_heads(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, one = make_run(tmp_path / "both", data), make_run(tmp_path / "one", data)
    call(monkeypatch, both.path, one.path, "--set", "num_epochs=2")
    [of_both, of_one] = [run.probes(10) / "heads-num_epochs_2.safetensors" for run in (both, one)]
    assert of_one.read_bytes() == of_both.read_bytes()
    call(monkeypatch, one.path, "--set", "num_epochs=2", "--set", "labels=[overlay]")
    assert of_one.read_bytes() == of_both.read_bytes()
    alone, together = (
        read_result(run.probes(10) / "overlay-num_epochs_2.json").model_dump(exclude={"seconds"}) for run in (one, both)
    )
    assert alone == together
    of_one.write_bytes(b"damaged")
    with pytest.raises(UserError, match=r"heads-num_epochs_2\.safetensors holds no heads"):
        read_heads(of_one)
    call(monkeypatch, one.path, "--set", "num_epochs=2", "--set", "labels=[overlay]")
    assert list(read_heads(of_one).by_label) == ["overlay"]


def test_the_embedding_and_the_pixels_are_filed_under_their_names(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = make_run(tmp_path / "run", data)
    fast = ["--set", "views=none", "--set", "num_epochs=2", "--set"]
    call(monkeypatch, run_dir.path, *fast, "reads=embedding")
    call(monkeypatch, run_dir.path, *fast, "reads=pixels", "--step", 0)
    encoder = load_modules(run_dir, step=10).encoder.eval()
    others = {"views": "none", "num_epochs": 2}
    for step, reads, function in (
        (10, "embedding", lambda x: encoder(x)),
        (0, "pixels", lambda x: (x - encoder.mean_C11).div(encoder.std_C11).flatten(1)),
    ):
        suffix = f"-num_epochs_2-views_none-reads_{reads}"
        assert {path.name for path in run_dir.probes(step).iterdir()} == {
            f"base{suffix}.json",
            f"overlay{suffix}.json",
            f"heads{suffix}.safetensors",
        }
        config = debug.image().probe.model_copy(update=others)
        expected = probe_any(function, data / "train", data / "test", config=config)
        for space, found in expected.items():
            result = read_result(run_dir.probes(step) / f"{space}{suffix}.json")
            assert result.probe_config == config.model_copy(update={"reads": reads}).protocol
            assert (result.linear.accuracy, result.knn.accuracy) == (found.linear, found.knn)
        assert f"reads {reads}" in read_heads(run_dir.probes(step) / f"heads{suffix}.safetensors").made_by
    with pytest.raises(UserError, match="reads=features"):
        probe_any(encoder, data / "train", data / "test", config=config.model_copy(update={"reads": "pixels"}))


@pytest.mark.slow
@pytest.mark.parametrize("streams", [False, True])
def test_test_samples_without_any_label_count_as_those_that_lack_a_label(
    streams: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 30 pictures, 10 have no label at all and 5 more no site; they are left out when the pictures are read."""
    root = tmp_path / "pictures"
    root.mkdir()
    lines = ["file,split,colour,site"]
    for split in ("train", "test"):
        for number in range(30):
            Image.new("RGB", (16, 16), (number, 90, 9 if split == "train" else 8)).save(root / f"{split}{number}.png")
            labels = "," if number < 10 else f"{'rg'[number % 2]},{'' if number < 15 else 'ab'[number % 2]}"
            lines.append(f"{split}{number}.png,{split},{labels}")
    (root / "labels.csv").write_text("\n".join(lines) + "\n")
    for split in ("train", "test"):
        build_dataset(
            "folder", tmp_path / split, root=root, source_options={"labels": str(root / "labels.csv")}, split=split
        )
    run_dir = make_run(tmp_path / "run", tmp_path, probe={"num_epochs": 1, "views": "none"})
    if streams:
        monkeypatch.setattr(features, "resident_bytes", lambda _: 1 << 60)
    call(monkeypatch, run_dir.path)
    colour, site = (read_result(run_dir.probes(10) / f"{name}.json") for name in ("colour", "site"))
    assert (colour.num_test, colour.num_unlabelled, site.num_test, site.num_unlabelled) == (20, 10, 15, 15)
    assert [groups.num_unlabelled for groups in (*colour.groups, *site.groups)] == [15, 15]
    assert [sum(num for *_, num in result.confusion["linear"]) for result in (colour, site)] == [20, 15]


def test_a_test_set_of_train_pictures_is_refused_with_their_number_and_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = share_sources(tmp_path / "data", num_test=50, num_shared=4)
    run_dir = make_run(tmp_path / "run", data, probe={"num_epochs": 1, "views": "none"})
    with pytest.raises(UserError) as refused:
        call(monkeypatch, run_dir.path)
    said = str(refused.value)
    assert said.startswith(f"4 of the 50 test samples of {tmp_path}/data/test (8 %) have their picture or sound in ")
    assert "(sample 00000003 is sample 00000007 of the train set and sample 00000004 is sample 00000008 of" in said
    assert "with probe.allow_shared" in said
    assert not (run_dir.path / "probes").exists()
    config = json.loads(run_dir.config.read_text())
    config["probe"]["allow_shared"] = 0.08
    run_dir.config.write_text(json.dumps(config))
    call(monkeypatch, run_dir.path)
    assert capsys.readouterr().err.startswith(f"4 of the 50 test samples of {tmp_path}/data/test (8 %) have their ")
    for label in ("base", "overlay"):
        assert read_result(run_dir.probes(10) / f"{label}.json").num_shared == 4


def command_of_rank(*arguments: str) -> str:
    """Return the output of the command as this rank of an existing process group."""
    out = io.StringIO()
    with ExitStack() as stack:
        stack.enter_context(
            mock.patch("trainer.distributed.environment.process_group", return_value=contextlib.nullcontext())
        )
        stack.enter_context(contextlib.redirect_stdout(out))
        sys.argv = ["probe", *arguments]
        main()
    return out.getvalue()


@pytest.mark.ranks
def test_ranks_find_what_one_process_finds(tmp_path: Path) -> None:
    data = write_tiny_pair(tmp_path / "data", num_train=53, num_test=31, overlay="online")
    probe = debug.image().probe.model_copy(update={"num_epochs": 2, "batch_size": 16}).model_dump()
    alone, together = (make_run(tmp_path / name, data, probe=probe) for name in ("alone", "together"))
    [printed] = run_ranks(command_of_rank, 1, str(alone.path))
    by_rank = run_ranks(command_of_rank, 3, str(together.path))
    assert by_rank == [printed.replace(str(alone.path), str(together.path)), "", ""]
    for space in ("base", "overlay"):
        one, other = (read_result(run.probes(10) / f"{space}.json") for run in (alone, together))
        assert one.model_dump(exclude={"seconds"}) == other.model_dump(exclude={"seconds"})
        assert one.num_test == 31
    heads = "probes/step_00000010/heads.safetensors"
    assert (alone.path / heads).read_bytes() == (together.path / heads).read_bytes()


def make_damaged_study(home: Path, data: Path) -> list[RunDir]:
    """Make three runs: one lacks its checkpoint, and the config of another one is damaged."""
    probe = {"num_epochs": 1, "views": "none"}
    study = [make_run(home / name, data, seed=seed, probe=probe) for seed, name in enumerate("abc")]
    shutil.rmtree(study[0].checkpoints)
    study[0].latest.unlink()
    study[1].config.write_text("{")
    return study


def statuses_of_rank(study: str) -> tuple[object, str]:
    """Return the exit status of the command as this rank, and what it prints on stderr."""
    with contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            command_of_rank(study)
        except SystemExit as end:
            return end.code, err.getvalue()
    return 0, err.getvalue()


@pytest.mark.ranks
def test_several_ranks_go_on_after_a_run_that_cannot_be_probed(tmp_path: Path) -> None:
    data = write_tiny_pair(tmp_path / "data", num_train=24, num_test=16)
    study = make_damaged_study(tmp_path / "study", data)
    (status, said), other = run_ranks(statuses_of_rank, 2, str(tmp_path / "study"))
    assert (status, other[0]) == (1, 1)
    assert [line.partition(": not probed: ")[0] for line in said.splitlines() if ": not probed: " in line] == [
        str(study[0].path),
        str(study[1].path),
    ]
    assert said.splitlines()[-1] == "error: 2 of 3 run(s) were not probed"
    assert "not probed" not in other[1]
    assert [steps_in(run_dir.all_probes) for run_dir in study] == [[], [], [10]]


def test_majority_share_is_that_of_the_train_sets_commonest_class() -> None:
    target = Target(torch.tensor([0, 1, 1]), torch.tensor([0, 0, 0, 1, 2]), num_classes=3)
    assert majority_share(target) == pytest.approx(1 / 5)


def test_wrong_input_is_said_in_one_sentence(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir, gone = (make_run(tmp_path / name, data) for name in ("run", "gone"))
    gone.config.write_text(gone.config.read_text().replace(str(data), str(tmp_path / "no_data")))
    for arguments, message in (
        ([tmp_path / "nothing"], "is not a run directory"),
        ([run_dir.path, "--step", 99], "no checkpoint of step 99; it has checkpoints of steps 0, 10"),
        ([gone.path], "no_data/train does not exist"),
    ):
        with pytest.raises(UserError, match=message):
            call(monkeypatch, *arguments)
    assert not gone.all_probes.exists()


@pytest.mark.parametrize(
    ("finished", "arguments", "is_final"),
    [(10, [], True), (None, [], False), (12, [], False), (10, ["--set", "num_epochs=1"], False)],
)
def test_the_summary_at_wandb_gets_the_runs_own_probe_of_its_end_alone(
    finished: int | None,
    arguments: list[object],
    is_final: bool,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_dir = make_run(tmp_path / "run", data, probe=ProbeConfig(num_epochs=2, views="none").model_dump())
    run_dir.provenance.write_text(json.dumps({} if finished is None else {"finished_step": finished}))
    found: list[set[str]] = []
    monkeypatch.setattr("trainer.observability.wandb_run.summarize", lambda *given: found.append(set(given[-1])))
    call(monkeypatch, run_dir.path, *arguments)
    names = {f"probe/{space}/{method}_final" for space in ("base", "overlay") for method in ("linear", "knn")}
    assert [names & of_call for of_call in found] == ([names] if is_final else [])


@pytest.mark.slow
def test_what_is_missing_is_probed_and_nothing_else(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    probe = {"num_epochs": 1, "views": "none"}
    study = [make_run(tmp_path / "study" / f"run{seed}", data, seed=seed, probe=probe) for seed in range(3)]
    call(monkeypatch, study[0].path, "--untrained")
    call(monkeypatch, study[1].path)
    capsys.readouterr()

    def probed(*options: str) -> set[str]:
        """Probe what is missing, and return the names of the runs that got results."""
        before = {path: path.stat().st_mtime_ns for path in (tmp_path / "study").rglob("probes/step_00000010/*.json")}
        call(monkeypatch, tmp_path / "study", "--missing", *options)
        after = {path: path.stat().st_mtime_ns for path in (tmp_path / "study").rglob("probes/step_00000010/*.json")}
        return {path.parts[-4] for path, at in after.items() if before.get(path) != at}

    assert probed() == {"run2"}
    assert "2 of 3 run(s) are probed already" in capsys.readouterr().out
    assert probed() == set()
    assert probed("--untrained") == {"run1", "run2"}
    (study[0].probes(10) / "base.json").write_text("{")
    assert probed("--untrained") == {"run0"}
    assert read_result(study[0].probes(10) / "base.json").checkpoint_step == 10
    study[2].latest.unlink()  # what is left of an unpacked run
    shutil.rmtree(study[2].checkpoints)
    write_json(study[2].provenance, {"finished_step": 10})
    assert probed("--all-steps") == set()
    os.utime(study[1].checkpoint(10), (time.time() + 60, time.time() + 60))  # trained again
    assert probed() == {"run1"}
