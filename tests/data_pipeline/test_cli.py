from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from data_pipeline.__main__ import main
from data_pipeline.errors import run_command
from tests.real_data import REPOSITORY

Run = tuple[int, list[str], list[str]]  # exit status, lines of stdout, lines of stderr


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Run:
    monkeypatch.setattr(sys, "argv", ["data_pipeline", *arguments])
    try:
        run_command(main)
        status = 0
    except SystemExit as exit_:
        status = int(exit_.code or 0)
    captured = capsys.readouterr()
    return status, captured.out.splitlines(), captured.err.splitlines()


def test_build_verify_and_preview(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    built = str(tmp_path / "built")
    build = ("build", "procedural_letters", "--out", built, "--limit", "40", "--samples-per-shard", "20")
    status, out, err = run(capsys, monkeypatch, *build)
    assert status == 0
    assert out[0].startswith(f"{built} built: 40 samples in 2 shards, ")
    assert err[-1].startswith("building built: 40/40 in ")

    status, out, _ = run(capsys, monkeypatch, *build)
    assert status == 0
    assert "is there already, built from the same pictures with the same arguments" in out[0]

    status, out, err = run(capsys, monkeypatch, *build, "--seed", "1")
    assert (status, out) == (2, [])
    assert err == [f"error: {built} was built with seed 0, not 1; choose another directory or remove it"]

    assert run(capsys, monkeypatch, "verify", built)[:2] == (0, [f"{built} is sound: 40 samples in 2 shards"])

    picture = str(tmp_path / "grid.png")
    assert run(capsys, monkeypatch, "preview", built, "--out", picture)[:2] == (0, [picture])
    assert Image.open(picture).size[0] > 900

    shard = tmp_path / "built" / "shard-00001.tar"
    shard.unlink()
    status, out, _ = run(capsys, monkeypatch, "verify", built)
    assert (status, out) == (1, ["shard-00001.tar: cannot be read (No such file or directory)"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "the following arguments are required: COMMAND; see `python -m data_pipeline --help`"),
        (("biuld",), "invalid choice: 'biuld'"),
        (("build", "procedural"), "the following arguments are required: --out"),
        (("build", "procedural", "--out", "{tmp}/x", "--limit", "many"), "argument --limit: invalid int value: 'many'"),
        (("build", "procedurl", "--out", "{tmp}/x"), 'unknown dataset "procedurl"; did you mean "procedural"?'),
        (("build", "procedural", "--out", "{tmp}/x", "--sede", "1"), "unrecognized arguments: --sede"),
        (("build", "cifar10", "--out", "{tmp}/x", "--root", "{tmp}/y"), "{tmp}/y does not hold torchvision's"),
        (("verify", "{tmp}/x"), "{tmp}/x does not exist; build it with"),
        (("preview", "{tmp}/x", "--out", "{tmp}/g.png"), "{tmp}/x does not exist; build it with"),
        (("preview", "{tmp}/x", "--out", "{tmp}/g.jpg"), "--out {tmp}/g.jpg does not end in .png"),
        (("preview", "{tmp}/x", "--out", "{tmp}/g.png", "--samples", "0"), "--samples must be at least 1, got 0"),
    ],
)
def test_a_mistake_is_one_sentence_and_status_2(
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    filled = [argument.replace("{tmp}", str(tmp_path)) for argument in arguments]
    status, out, err = run(capsys, monkeypatch, *filled)
    assert (status, out) == (2, [])
    assert len(err) == 1
    assert err[0].startswith("error: ")
    assert message.replace("{tmp}", str(tmp_path)) in err[0]
    assert list(tmp_path.iterdir()) == []


def test_preview_does_not_guess_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(capsys, monkeypatch, "build", "procedural", "--out", str(tmp_path / "built"), "--limit", "10")
    target = tmp_path / "no" / "grid.png"
    status, _, err = run(capsys, monkeypatch, "preview", str(tmp_path / "built"), "--out", str(target))
    assert status == 2
    assert err[-1] == f"error: cannot write {target} (No such file or directory); choose another --out"


@pytest.mark.parametrize("command", ["build", "verify", "preview", "trace", "bench"])
def test_every_command_explains_itself(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, out, _ = run(capsys, monkeypatch, command, "--help")
    assert status == 0
    assert out[0].startswith(f"usage: python -m data_pipeline {command} ")
    assert len(out) < 45


def test_the_module_runs_as_a_command() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "data_pipeline", "verify", "/nowhere"], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert result.returncode == 2
    assert result.stderr.startswith("error: /nowhere does not exist")
    assert result.stderr.count("\n") == 1
