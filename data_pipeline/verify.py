"""Read every byte of a dataset and name all that is wrong with it, by shard and key."""

from __future__ import annotations

import argparse
import hashlib
import io
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from numpy.typing import NDArray
from torchvision.io import ImageReadMode, decode_png

from data_pipeline.audio.waveform import decode_wav
from data_pipeline.errors import UserError
from data_pipeline.manifest import MANIFEST_NAME, OVERLAY_NAME, SOURCE_DIGESTS_NAME, Manifest, ShardEntry, load_manifest
from data_pipeline.overlays.registry import kind_of, load_overlay
from data_pipeline.progress import Progress
from data_pipeline.remote import is_remote
from data_pipeline.sample import MASK_BOX, MASK_OBJECT, MASK_OUTSIDE, Sample
from data_pipeline.shards import index_path, index_shard
from data_pipeline.source_digests import check_source_digests
from data_pipeline.store import label_ranges, read_labels
from data_pipeline.totals import Totals

_NUM_ZEROS_AT_END = 2 * tarfile.BLOCKSIZE  # bytes, with which every whole tar ends
_MASK_LEVELS = torch.tensor([MASK_OUTSIDE, MASK_BOX, MASK_OBJECT], dtype=torch.uint8)


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, in a file of the dataset, and with one of its samples where `key` is given."""

    file: str
    key: str | None
    what: str

    def __str__(self) -> str:
        return f"{self.file}: {f'{self.key}: ' if self.key else ''}{self.what}"


def find_problems(directory: Path) -> Iterator[Problem]:
    """Every problem of the dataset in `directory`, in the order of the shards; none means that each byte is as it was
    built.

    Checks the shards' sizes and sha256; that each tar is whole and holds the samples that are due there, in order, each
    in one piece; that pictures or sounds, masks and labels decode and fit the manifest; that counts, mean and std are
    those of the samples; that an index beside a shard is that shard's; and that the source digests, and what an online
    overlay draws from, are there. Raises `UserError` where `directory` is no dataset.
    """
    manifest = load_manifest(directory)
    num_overlay = 0 if manifest.is_online else len(manifest.label_names.overlay)
    totals = Totals(num_base=len(manifest.label_names.base), num_overlay=num_overlay)
    first_index, is_sound = 0, True
    with Progress(f"verifying {directory.name}", total=manifest.num_samples) as progress:
        for entry in manifest.shards:
            due = range(first_index, first_index + entry.num_samples)
            for key, what in _shard_problems(directory / entry.name, entry, due, manifest, totals):
                is_sound = False
                yield Problem(entry.name, key, what)
            first_index = due.stop
            progress.advance(entry.num_samples)
    for path in sorted(directory.glob("*.tar")):
        if path.name not in {entry.name for entry in manifest.shards}:
            yield Problem(path.name, None, f"is not named in {MANIFEST_NAME}")
    if manifest.is_online and (wrong := _overlay_problem(directory / OVERLAY_NAME, manifest)) is not None:
        yield Problem(OVERLAY_NAME, None, wrong)
    if manifest.source_digests_sha256 is not None:
        path = directory / SOURCE_DIGESTS_NAME
        try:
            check_source_digests(path, manifest)
        except UserError as error:
            yield Problem(SOURCE_DIGESTS_NAME, None, str(error).removeprefix(f"{path} "))
    if manifest.num_samples != first_index:
        what = f"num_samples is {manifest.num_samples}, but its shards add up to {first_index}"
        yield Problem(MANIFEST_NAME, None, what)
    for name in ("counts_base", "counts_overlay", "mean", "std") if is_sound else ():
        if (said := getattr(manifest, name)) != (found := getattr(totals, name)):
            yield Problem(MANIFEST_NAME, None, f"{name} is {said}, but that of the samples is {found}")


def _overlay_problem(path: Path, manifest: Manifest) -> str | None:
    assert manifest.overlay is not None
    try:
        overlay = load_overlay(path, sha256=manifest.overlay.sha256)
    except UserError as error:
        return str(error).removeprefix(f"{path} ")
    said = (manifest.overlay.kind, manifest.label_names.overlay)
    found = (kind_of(overlay), overlay.class_names)
    return None if found == said else f"holds the overlay and classes {found}, but {MANIFEST_NAME} says {said}"


def _shard_problems(
    path: Path, entry: ShardEntry, due: range, manifest: Manifest, totals: Totals
) -> Iterator[tuple[str | None, str]]:
    """Key and description of each problem of one shard; adds its sound samples to `totals`."""
    try:
        data = path.read_bytes()
    except OSError as error:
        yield None, f"cannot be read ({error.strerror})"
        return
    if len(data) != entry.num_bytes:
        yield None, f"has {len(data)} bytes, but {MANIFEST_NAME} says {entry.num_bytes}"
    if (sha256 := hashlib.sha256(data).hexdigest()) != entry.sha256:
        yield None, f"has the sha256 {sha256}, but {MANIFEST_NAME} says {entry.sha256}"
    members, is_whole = _read_tar(data)
    samples: dict[str, dict[str, bytes]] = {}
    last_key = None
    for name, content in members:
        key, _, extension = name.partition(".")
        if key != last_key and key in samples:
            yield key, f"its members do not lie side by side: {name} comes after those of {last_key}"
        if extension in samples.setdefault(key, {}):
            yield key, f"{name} is there twice"
        samples[key][extension] = content
        last_key = key
    if not is_whole:
        yield None, f"is cut short or damaged after sample {last_key}"
    keys = [f"{index:08d}" for index in due]
    for key in sorted(samples.keys() ^ set(keys)):
        yield key, f"does not belong among {keys[0]} to {keys[-1]}" if key in samples else "is missing"
    if list(samples) != keys and sorted(samples) == keys:
        yield None, "its samples are not in the order of their keys"
    for key, fields in samples.items():
        if not (key.isascii() and key.isdigit()):
            continue  # told above: it does not belong there
        try:
            totals.add(_decode(key, fields, manifest))
        except ValueError as error:
            yield key, " ".join(str(error).split())
    if _index_is_wrong(path, members=manifest.members, due=due, sha256=sha256):
        yield None, f"{index_path(path).name} beside it does not fit; remove it"


def _read_tar(data: bytes) -> tuple[list[tuple[str, bytes]], bool]:
    """Names and contents of the members of a tar, and whether it ends as a tar does, in zeros.

    A tar that is cut short or overwritten gives the members up to there: tarfile itself may end without an error.
    """
    members: list[tuple[str, bytes]] = []
    end = 0
    with suppress(tarfile.TarError), tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
        for member in tar:
            content = data[member.offset_data : member.offset_data + member.size]
            if len(content) < member.size:
                break
            members.append((member.name, content))
            end = member.offset_data + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
    rest = data[end:]
    return members, len(rest) >= _NUM_ZEROS_AT_END and not any(rest)


def _decode(key: str, fields: dict[str, bytes], manifest: Manifest) -> Sample:
    """The sample; raises an error that tells what is wrong where it does not decode or does not fit the manifest."""
    for extension in sorted(fields.keys() ^ set(manifest.members)):
        raise ValueError(f"{key}.{extension} is {'not known' if extension in fields else 'missing'}")
    label_base, label_overlay = read_labels(fields["json"], int(key), *label_ranges(manifest))
    content: NDArray[Any]
    mask = None
    if manifest.medium == "sound":
        content = _decode_wav(f"{key}.wav", fields["wav"], sample_rate=manifest.sample_rate)
    else:
        num_channels, height, width = manifest.input_shape
        content = _decode_png(f"{key}.png", fields["png"], (num_channels, height, width)).permute(1, 2, 0).numpy()
        if "mask.png" in fields:
            mask_1HW = _decode_png(f"{key}.mask.png", fields["mask.png"], (1, height, width))
            if not torch.isin(mask_1HW, _MASK_LEVELS).all():
                raise ValueError(f"{key}.mask.png has other levels than {_MASK_LEVELS.tolist()}")
            mask = mask_1HW[0].numpy()
    return Sample(int(key), content, mask, label_base, label_overlay)


def _decode_wav(name: str, data: bytes, *, sample_rate: int | None) -> NDArray[np.int16] | NDArray[np.float32]:
    try:
        points = decode_wav(data)
        found_rate = soundfile.info(io.BytesIO(data)).samplerate
    except (ValueError, soundfile.LibsndfileError) as error:
        raise ValueError(f"{name} does not decode ({error})") from None
    if found_rate != sample_rate:
        raise ValueError(f"{name} has {found_rate} points a second, not {sample_rate}")
    if not np.isfinite(points).all():
        raise ValueError(f"{name} holds points that are not numbers")
    return points


def _decode_png(name: str, data: bytes, shape: tuple[int, int, int]) -> torch.Tensor:
    try:
        pixels: torch.Tensor = decode_png(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.UNCHANGED)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{name} does not decode ({error})") from None
    if pixels.shape != shape or pixels.dtype != torch.uint8:
        raise ValueError(f"{name} is {tuple(pixels.shape)} {pixels.dtype}, not {shape} torch.uint8")
    return pixels


def _index_is_wrong(shard: Path, *, members: tuple[str, ...], due: range, sha256: str) -> bool:
    """Whether an index beside a shard claims to be that shard's but is not. A stale one is rebuilt by its readers."""
    try:
        with np.load(index_path(shard)) as saved:
            if str(saved["shard_sha256"]) != sha256:
                return False
            return not np.array_equal(saved["rows"], index_shard(shard, members=members, due=due))
    except FileNotFoundError:
        return False
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="a built dataset on this machine")


def run(args: argparse.Namespace) -> None:
    if is_remote(args.directory):
        raise UserError(f"{args.directory} is not on this machine; copy it here and verify the copy")
    directory = Path(args.directory)
    num_problems = 0
    for problem in find_problems(directory):
        num_problems += 1
        print(problem)
    if num_problems:
        raise SystemExit(1)
    manifest = load_manifest(directory)
    print(f"{directory} is sound: {manifest.num_samples} samples in {len(manifest.shards)} shards")
