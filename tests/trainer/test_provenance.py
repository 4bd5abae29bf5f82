"""provenance.json names the commit of the running code. No setting of git and no variable changes that."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from trainer import provenance
from trainer.provenance import this_code

OWNER = ["-c", "user.name=me", "-c", "user.email=me@host"]


def git(repository: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=repository, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "repository"
    (folder / "trainer").mkdir(parents=True)
    (folder / "trainer" / "step.py").write_text("rate = 1\n\n")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, *OWNER, "commit", "-q", "-m", "first")
    monkeypatch.setattr(provenance, "REPOSITORY", folder)
    return folder


def test_the_difference_is_a_patch_whatever_git_is_told(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = git(repository, "rev-parse", "HEAD").strip()
    assert (this_code().git_commit, this_code().git_diff) == (commit, "")
    (repository / "trainer" / "step.py").write_text("rate = 2\n\n")
    (repository / ".gitattributes").write_text("*.py diff=words\n")
    git(repository, "config", "color.ui", "always")
    git(repository, "config", "diff.external", "echo nothing")
    git(repository, "config", "diff.words.textconv", "echo nothing")
    monkeypatch.setenv("GIT_DIR", str(tmp_path))
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", "true")
    if os.getuid() == 0:  # a repository of another user, as in a container
        for path in (repository, repository / ".git"):
            os.chown(path, 12345, 12345)
    code = this_code()
    assert code.git_commit == commit
    monkeypatch.delenv("GIT_DIR")
    (copy := tmp_path / "copy" / "trainer").mkdir(parents=True)
    (copy / "step.py").write_text("rate = 1\n\n")
    (copy / "patch").write_text(str(code.git_diff))
    git(copy.parent, "apply", "trainer/patch")
    assert (copy / "step.py").read_text() == "rate = 2\n\n"


def test_a_module_that_git_does_not_track_is_a_change(repository: Path) -> None:
    (repository / "notes.txt").write_text("of the user")
    assert not this_code().git_diff
    new = repository / "trainer" / "new loss.py"
    new.write_text("a = 1\n")
    first = this_code().git_diff
    assert first is not None
    assert first.startswith("untracked trainer/new loss.py ")
    new.write_text("a = 2\n")
    assert this_code().git_diff != first


def test_code_that_git_cannot_read_is_not_called_unchanged(
    repository: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (repository / ".git" / "HEAD").unlink()
    code = this_code()
    assert (code.git_commit, code.git_diff) == (None, None)
    assert "commit of the code is not recorded" in caplog.text
    monkeypatch.setenv("PATH", "")
    caplog.clear()
    assert this_code().git_commit is None
    assert "commit of the code is not recorded" in caplog.text
