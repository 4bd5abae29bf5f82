"""The code of other packages that a run uses: which it is, where its source lies, and whether it has changed.

A run uses the packages of the config classes in its sections, and of overlays that are drawn while samples are read.
The package of a class is the first part of its import path, so its other modules count too, but not other packages that
they import. A start of a run records the SHA-256 of the source of each.

Invariant: a run goes on with the same code of its own, or with new code that the user has accepted. Commands that only
read a run warn of new code.
"""

from __future__ import annotations

import hashlib
import logging
import site
import sys
import sysconfig
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from data_pipeline.core.errors import UserError
from data_pipeline.core.imports import given_code
from data_pipeline.core.kinds import OF_THIS_PROJECT, is_own, package_of, sections
from data_pipeline.overlays.registry import NAMES as OVERLAY_NAMES
from data_pipeline.overlays.registry import find_overlay
from data_pipeline.storage.manifest import Manifest
from trainer.config import RunConfig
from trainer.distributed.collectives import rank
from trainer.run_dir import RunDir

logger = logging.getLogger(__name__)

RECORDED_CODE: Final = "own_code"  # the key in each start of provenance.json
_SUFFIXES: Final = frozenset({".py", ".so"})
_NAME_DIGITS: Final = 12


def own_packages(config: RunConfig, manifests: Sequence[Manifest] = ()) -> list[str]:
    """Return the packages, or single modules, that a run uses and that are not of this project; sorted.

    They are those of its config classes, and of the online overlays of the datasets with these `manifests`.
    """
    of_config = {package_of(type(section)) for section in sections(config) if is_own(section)}
    online = {each.overlay.kind for each in manifests if each.overlay is not None and each.overlay.drawn == "online"}
    known = set(OVERLAY_NAMES.names()) - OVERLAY_NAMES.built_in.keys()
    of_overlays = {package_of(find_overlay(kind)) for kind in online & known}
    return sorted(of_config | of_overlays)


def source_files(package: str, *, suffixes: Collection[str] | None = _SUFFIXES) -> dict[str, Path]:
    """Return the files of an imported package or module, by their paths below the directory that holds it.

    `suffixes` limits them to files of source; None returns all but caches.
    """
    module = sys.modules[package]
    if module.__spec__ is None or module.__spec__.submodule_search_locations is None:
        path = None if module.__file__ is None else Path(module.__file__)
        return {} if path is None else {path.name: path}
    files = {}
    for folder in map(Path, module.__spec__.submodule_search_locations):
        for path in sorted(folder.rglob("*")):
            is_wanted = suffixes is None or path.suffix in suffixes
            if path.is_file() and is_wanted and "__pycache__" not in path.parts:
                files[str(Path(package, path.relative_to(folder)))] = path
    return files


def files_to_copy(configs: Sequence[RunConfig]) -> dict[str, Path]:
    """Return the files of all code of the user's own that a copy of the code for jobs must hold.

    These are the code of the `configs`, and what `--code` has imported. Installed packages are left out, because a job
    finds them where it finds torch. A package that is installed for editing is copied, because it may be edited while
    the job waits.
    """
    packages = {package for config in configs for package in own_packages(config)}
    packages |= {module.partition(".")[0] for module in given_code()} - OF_THIS_PROJECT
    files: dict[str, Path] = {}
    for package in sorted(packages):
        found = source_files(package, suffixes=None)
        if not any(_is_installed(path) for path in found.values()):
            files |= found
    return files


def _is_installed(path: Path) -> bool:
    paths = sysconfig.get_paths()
    installed = [paths["purelib"], paths["platlib"], *site.getsitepackages(), site.getusersitepackages()]
    return any(path.resolve().is_relative_to(Path(folder).resolve()) for folder in installed)


def hashes_of_code(config: RunConfig, manifests: Sequence[Manifest] = ()) -> dict[str, str]:
    """Return the SHA-256 of the source of each package of a run; `manifests` are those of its datasets."""
    return {package: hash_of_files(source_files(package)) for package in own_packages(config, manifests)}


def hash_of_files(files: Mapping[str, bytes | Path]) -> str:
    """Return the SHA-256 of all names and contents; it does not depend on the directory of the files."""
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        for part in (name.encode(), content.read_bytes() if isinstance(content, Path) else content):
            digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


def check_same_code(
    run_dir: RunDir,
    config: RunConfig,
    manifests: Sequence[Manifest] = (),
    *,
    step: int,
    accepted: Collection[str],
) -> None:
    """Compare the code of a run's own with that of its last start, because it goes on from a checkpoint of `step`.

    `manifests` are those of its datasets. `accepted` are names of changed code with which the run may go on, as this
    error gives them; then logs a warning. Raises `UserError` for code that has changed and was not accepted.
    """
    before = _recorded_code(run_dir)
    for package, now in hashes_of_code(config, manifests).items():
        if before.get(package, now) == now:
            continue
        name = f"{package}:{now[:_NAME_DIGITS]}"
        if name not in accepted:
            raise UserError(
                f"the code of {package} with which {run_dir.path} was trained up to step {step} has changed; put it "
                f"back, pass --accept-code {name} to go on with the new code, or pass another --run-dir"
            )
        logger.warning("the code of %s was changed after step %d: going on with it, as you accepted", package, step)


def warn_of_changed_code(run_dir: RunDir) -> None:
    """Log a warning on rank 0 for each package whose code has changed since the newest start of a run.

    Call this when the config of the run was read, which imports its code. Code that was not imported is left out.
    """
    before = _recorded_code(run_dir) if rank() == 0 else {}
    for name in set(OVERLAY_NAMES.names()) - OVERLAY_NAMES.built_in.keys() if before else ():
        find_overlay(name)  # imports it
    for package, sha256 in before.items():
        if package in sys.modules and hash_of_files(source_files(package)) != sha256:
            logger.warning(
                "the code of %s has changed since the training of %s: using that of now", package, run_dir.path
            )


def _recorded_code(run_dir: RunDir) -> Mapping[str, Any]:
    """Return the SHA-256 of each package that the newest start of a run has recorded."""
    starts = run_dir.read_provenance().get("starts", [])
    return starts[-1].get(RECORDED_CODE, {}) if starts else {}
