from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import struct
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import soundfile
from PIL import Image

from data_pipeline.__main__ import main
from data_pipeline.building.build import build_dataset
from data_pipeline.core.errors import UserError
from data_pipeline.loading.decode import decode
from data_pipeline.remote import fetch
from data_pipeline.storage.manifest import Manifest, load_manifest
from data_pipeline.storage.png import encode_png
from data_pipeline.storage.shards import index_content, index_path, index_shard
from data_pipeline.storage.store import SampleStore
from data_pipeline.tools.verify import Verification
from tests.data_pipeline.limits import memory_limit
from tests.data_pipeline.remote.http_server import serve
from tests.data_pipeline.stored_samples import find_problems
from tests.tiny_data import SAMPLE_RATE, write_tiny_dataset, write_tiny_sounds

Members = list[tuple[str, bytes]]
SHARD = "shard-00001.tar"  # holds samples 10 to 19 of 30


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("verify") / "sound"
    build_dataset("procedural_shapes", directory, limit=30, num_samples_per_shard=10)
    return directory


@pytest.fixture
def copy(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "copy"))


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeat attempts at damaged remote files at once, because the pauses between them are 7.5 seconds."""
    monkeypatch.setattr(fetch, "_LONGEST_PAUSE", 0.01)


def problems(directory: Path) -> list[str]:
    return [str(problem) for problem in find_problems(directory)]


def read_members(path: Path) -> Members:
    with tarfile.open(path) as tar:
        return [(member.name, tar.extractfile(member).read()) for member in tar]  # type: ignore[union-attr]


def write_members(directory: Path, members: Members) -> None:
    """Write the shard anew, and a manifest that agrees with its bytes, so that only what is inside can be wrong."""
    path = directory / SHARD
    path.chmod(0o644)
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    adopt(directory)


def adopt(directory: Path) -> None:
    path, manifest = directory / SHARD, load_manifest(directory)
    rows = index_shard(path, members=manifest.members, due=range(10, 20))
    told = {
        "num_bytes": path.stat().st_size,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "index_sha256": hashlib.sha256(index_content(rows)).hexdigest(),
    }
    index_path(path).unlink(missing_ok=True)
    entries = [entry.model_copy(update=told) if entry.name == SHARD else entry for entry in manifest.shards]
    write_manifest(directory, manifest.model_copy(update={"shards": tuple(entries)}))


def write_manifest(directory: Path, manifest: Manifest) -> None:
    (directory / "manifest.json").write_text(manifest.model_dump_json())


def png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def replace(name: str, change: Callable[[bytes], bytes]) -> Callable[[Members], Members]:
    return lambda members: [(key, change(content) if key == name else content) for key, content in members]


def set_json(**changed: object) -> Callable[[bytes], bytes]:
    return lambda content: json.dumps({**json.loads(content), **changed}).encode()


def test_a_sound_dataset_has_no_problems(sound: Path, copy: Path) -> None:
    assert problems(sound) == []
    write_members(copy, read_members(copy / SHARD))  # another writer's tar of the same samples
    assert problems(copy) == []
    index_path(copy / "shard-00000.tar").unlink()
    assert problems(copy) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (replace("00000012.png", lambda png: png[:-40]), ["00000012: 00000012.png does not decode"]),
        (replace("00000012.png", lambda png: b""), ["00000012: 00000012.png does not decode"]),
        (replace("00000012.mask.png", lambda png: b"x" * 90), ["00000012: 00000012.mask.png does not decode"]),
        (replace("00000012.json", lambda json: b"{"), ["00000012: 00000012.json does not decode"]),
        (replace("00000012.json", lambda json: b"{}"), ["00000012: 00000012.json does not decode (KeyError('index'))"]),
        (replace("00000012.json", lambda json: b"[]"), ["00000012: 00000012.json does not decode"]),
        (replace("00000012.json", set_json(index=13)), ["00000012: 00000012.json says that it is sample 13"]),
        (replace("00000012.json", set_json(label_base=10)), ["00000012: label_base is 10, not one of 0 to 9"]),
        (replace("00000012.json", set_json(label_base=-1)), ["00000012: label_base is -1, not one of 0 to 9"]),
        (replace("00000012.json", set_json(label_overlay=3)), ["00000012: label_overlay is 3, not one of 0 to 2"]),
        (replace("00000012.json", set_json(label_overlay="1")), ["00000012: label_overlay is '1', not one of 0 to 2"]),
        (
            replace("00000012.png", lambda _: png(np.zeros((32, 31, 3), np.uint8))),
            ["00000012: 00000012.png does not decode (it is 31x32 pixels, not 32x32)"],
        ),
        (
            replace("00000012.png", lambda _: png(np.zeros((32, 32), np.uint8))),
            ["00000012: 00000012.png is (1, 32, 32) torch.uint8, not (3, 32, 32) torch.uint8"],
        ),
        (
            replace("00000012.mask.png", lambda _: png(np.full((32, 32), 7, np.uint8))),
            ["00000012: 00000012.mask.png has other levels than [0, 128, 255]"],
        ),
        (
            lambda members: [member for member in members if member[0] != "00000012.mask.png"],
            ["00000012: 00000012.mask.png is missing"],
        ),
        (lambda members: [*members, ("00000019.cls", b"1")], ["00000019: 00000019.cls is not known"]),
        (lambda members: members[:6] + members[9:], ["00000012: is missing"]),
        (lambda members: members[3:] + members[:3], ["its samples are not in the order of their keys"]),
        (
            lambda members: [*members[:4], members[6], members[5], members[4], *members[7:]],
            [
                "00000011: its members are not side by side: 00000011.png comes after members of 00000012",
                "00000012: its members are not side by side: 00000012.mask.png comes after members of 00000011",
            ],
        ),
        (lambda members: [*members, members[-1]], ["00000019: 00000019.png is there twice"]),
        (
            lambda members: [*members, *members[:3]],
            [
                "00000010: its members are not side by side: 00000010.json comes after members of 00000019",
                *(f"00000010: 00000010.{member} is there twice" for member in ("json", "mask.png", "png")),
            ],
        ),
        (
            lambda members: [*members, *((name.replace("19", "77", 1), data) for name, data in members[-3:])],
            [
                "00000077: does not belong among 00000010 to 00000019",
                "00000077: 00000077.json says that it is sample 19",
            ],
        ),
    ],
)
def test_what_is_wrong_inside_a_shard_is_named_by_shard_and_key(
    change: Callable[[Members], Members], expected: list[str], copy: Path
) -> None:
    write_members(copy, change(read_members(copy / SHARD)))
    found = problems(copy)
    assert len(found) == len(expected), found
    for problem, what in zip(found, expected, strict=True):
        assert problem.startswith(f"{SHARD}: {what}")


@pytest.mark.parametrize("cut", [1, 1024, 5000, "member", "header", "all"])
def test_a_shard_cut_short_anywhere_is_found_without_its_hash(cut: int | str, copy: Path) -> None:
    """Also where the cut falls between two members, where tarfile itself sees nothing wrong."""
    path = copy / SHARD
    with tarfile.open(path) as tar:
        last = tar.getmembers()[-1]
    data = path.read_bytes()
    ends = {"member": last.offset, "header": last.offset + 100, "all": 0}
    path.chmod(0o644)
    end = ends[cut] if isinstance(cut, str) else len(data) - cut
    path.write_bytes(data[:end])
    hash_and_size = [problem for problem in problems(copy) if "sha256" in problem or "bytes" in problem]
    assert len(hash_and_size) == 2
    assert hash_and_size[0] == f"{SHARD}: has {end} bytes, but manifest.json says {len(data)}"
    adopt(copy)
    if end == 0:  # a manifest that agrees with this contradicts itself
        with pytest.raises(UserError, match=r"shards\[1\]\.num_bytes is 0; it must be above 0"):
            problems(copy)
        return
    found = problems(copy)
    if cut in (1, 1024, 5000):  # the padding of the tar, more than the two blocks that must be there
        assert len(data) - end > 0
        padding = len(data) - (last.offset_data + -(-last.size // 512) * 512)
        assert any("is cut short" in problem for problem in found) == (padding - int(cut) < 1024)
    else:
        assert any(problem.startswith(f"{SHARD}: is cut short or damaged after sample") for problem in found)
        assert f"{SHARD}: 00000019: 00000019.png is missing" in found or f"{SHARD}: 00000019: is missing" in found


def test_any_flipped_byte_is_found(copy: Path) -> None:
    data = bytearray((copy / SHARD).read_bytes())
    (copy / SHARD).chmod(0o644)
    for position in np.random.default_rng(0).integers(0, len(data), 8):
        data[position] ^= 1
        (copy / SHARD).write_bytes(data)
        assert problems(copy)[0].startswith(f"{SHARD}: has the sha256 ")
        data[position] ^= 1


def test_missing_and_surplus_files_are_named(copy: Path) -> None:
    shutil.copy(copy / SHARD, copy / "shard-00003.tar")
    (copy / SHARD).unlink()
    assert problems(copy) == [
        f"{SHARD}: cannot be read (No such file or directory)",
        "shard-00003.tar: is not listed in manifest.json",
    ]


def test_a_wrong_index_beside_a_shard_is_found(copy: Path) -> None:
    index = copy / "shard-00001.index"
    rows = np.frombuffer(index.read_bytes(), dtype="<i8").copy()
    rows[18] += 512
    for content in (rows.tobytes(), index.read_bytes()[:100], index.read_bytes() + bytes(100), b""):
        index.write_bytes(content)
        assert problems(copy) == [
            f"{SHARD}: shard-00001.index beside it is not the index that manifest.json names; remove it"
        ]


def test_an_index_that_the_manifest_names_is_compared_with_the_tar(copy: Path) -> None:
    """Whoever writes the manifest can name any index in it."""
    rows = index_shard(copy / SHARD, members=("json", "mask.png", "png"), due=range(10, 20))
    rows[:, 4:] = np.roll(rows[:, 4:], 1, axis=0)
    content = index_content(rows)
    index_path(copy / SHARD).write_bytes(content)
    manifest = load_manifest(copy)
    named = {"index_sha256": hashlib.sha256(content).hexdigest()}
    entries = [entry.model_copy(update=named) if entry.name == SHARD else entry for entry in manifest.shards]
    write_manifest(copy, manifest.model_copy(update={"shards": tuple(entries)}))
    assert problems(copy) == [f"{SHARD}: the offsets of its members do not match manifest.json (index_sha256)"]
    bad = decode(SampleStore(copy), np.arange(30)).bad
    assert [sample.index for sample in bad.values()] == list(range(10, 20))
    with pytest.raises(UserError, match=r"index and the tar disagree about where 00000013\.png is"):
        SampleStore(copy).encoded(13)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (
            {"counts_base": (4, 2, *(3,) * 8)},
            "counts_base is (4, 2, 3, 3, 3, 3, 3, 3, 3, 3), but the samples give",
        ),
        ({"counts_overlay": (0, 0, 30)}, "counts_overlay is (0, 0, 30), but the samples give"),
        ({"mean": (0.5, 0.5, 0.5)}, "mean is (0.5, 0.5, 0.5), but the samples give"),
        ({"std": (0.5, 0.5, 0.5)}, "std is (0.5, 0.5, 0.5), but the samples give"),
    ],
)
def test_a_manifest_that_does_not_fit_the_samples_is_found(
    changed: dict[str, object], expected: str, copy: Path
) -> None:
    write_manifest(copy, load_manifest(copy).model_copy(update=changed))
    [problem] = problems(copy)
    assert problem.startswith(f"manifest.json: {expected}")


def test_all_problems_are_told_at_once(copy: Path) -> None:
    first = replace("00000012.png", lambda _: b"")
    second = replace("00000015.json", set_json(label_base=10))
    write_members(copy, second(first(read_members(copy / SHARD))))
    (copy / "shard-00002.tar").unlink()
    assert [problem.split(": ")[:2] for problem in problems(copy)] == [
        [SHARD, "00000012"],
        [SHARD, "00000015"],
        ["shard-00002.tar", "cannot be read (No such file or directory)"],
    ]


def test_an_object_where_the_dataset_has_none_is_found(tmp_path: Path) -> None:
    build_dataset("procedural", tmp_path / "plain", limit=30, num_samples_per_shard=10)
    assert problems(tmp_path / "plain") == []
    change = replace("00000012.json", set_json(label_overlay=0))
    write_members(tmp_path / "plain", change(read_members(tmp_path / "plain" / SHARD)))
    assert problems(tmp_path / "plain") == [f"{SHARD}: 00000012: label_overlay is 0, not one of -1 to -1"]


def wav(points: np.ndarray, *, sample_rate: int = SAMPLE_RATE, subtype: str = "PCM_16") -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, points, sample_rate, format="WAV", subtype=subtype)
    return buffer.getvalue()


TONE = np.sin(np.arange(5_000))


@pytest.mark.parametrize("overlay", ["none", "baked"])
def test_sounds_are_verified(tmp_path: Path, overlay: Literal["none", "baked"]) -> None:
    directory = write_tiny_sounds(tmp_path / "sounds", num_samples=30, num_samples_per_shard=10, overlay=overlay)
    assert problems(directory) == []
    write_members(directory, read_members(directory / SHARD))
    assert problems(directory) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda data: data[:-100], "00000012.wav does not decode (the WAV is cut off"),
        (lambda _: b"", "00000012.wav does not decode (it is not a WAV"),
        (lambda _: wav(TONE, sample_rate=44_100), "00000012.wav has 44100 points a second, not 8000"),
        (lambda _: wav(np.stack([TONE, TONE], axis=1)), "00000012.wav does not decode (the WAV has 2 channels"),
        (lambda _: wav(TONE[:0]), "00000012.wav does not decode (the WAV holds 0 bytes"),
        (
            lambda _: wav(TONE, subtype="PCM_24"),
            "00000012.wav does not decode (the WAV has 1 channels of format 1 with 24",
        ),
        (lambda _: wav(TONE * np.nan, subtype="FLOAT"), "00000012.wav holds points that are not numbers"),
    ],
)
def test_what_is_wrong_with_a_sound_is_named(change: Callable[[bytes], bytes], expected: str, tmp_path: Path) -> None:
    directory = write_tiny_sounds(tmp_path / "sounds", num_samples=30, num_samples_per_shard=10)
    write_members(directory, replace("00000012.wav", change)(read_members(directory / SHARD)))
    [problem] = problems(directory)
    assert problem.startswith(f"{SHARD}: 00000012: {expected}")


def test_the_assets_of_an_online_overlay_are_verified(tmp_path: Path) -> None:
    directory = write_tiny_dataset(tmp_path / "online", num_samples=20, overlay="online")
    assert problems(directory) == []
    manifest = load_manifest(directory)
    assert manifest.overlay is not None
    renamed = manifest.label_names.model_copy(update={"overlay": ("a", "b", "c")})
    write_manifest(directory, manifest.model_copy(update={"label_names": renamed}))
    [problem] = problems(directory)
    assert problem.startswith("overlay.safetensors: holds the overlay and classes ('shapes', (")
    write_manifest(directory, manifest)
    path = directory / "overlay.safetensors"
    path.write_bytes(path.read_bytes() + b" ")
    [problem] = problems(directory)
    assert problem.startswith("overlay.safetensors: is not the file that the manifest names by sha256")
    path.unlink()
    [problem] = problems(directory)
    assert problem.startswith("overlay.safetensors: cannot be read (No such file or directory)")


def test_what_is_found_is_what_the_store_cannot_read(tmp_path: Path) -> None:
    """The same samples are bad in training as here."""
    directory = write_tiny_dataset(tmp_path / "data", num_samples=30, num_samples_per_shard=10)
    changes: list[Callable[[Members], Members]] = [
        replace("00000011.png", lambda data: data[:-40]),
        replace("00000013.mask.png", lambda _: b""),
        replace("00000014.json", set_json(label_base=2)),
        replace("00000015.json", set_json(index=16)),
        lambda members: [*members[:24], *members[27:]],
        lambda members: [member for member in members if member[0] != "00000017.json"],
        lambda members: [*members[-3:], *members[1:-3:2], *members[:-3:2]],
    ]
    members = read_members(directory / SHARD)
    for change in changes:
        members = change(members)
    write_members(directory, members)
    found = {problem.key for problem in find_problems(directory) if "side by side" not in problem.what}
    store = SampleStore(directory)
    assert {bad.key for bad in decode(store, np.arange(30)).bad.values()} == found - {None}
    assert len(found - {None}) == 6
    assert {bad.key for bad in store.known_bad} < found


def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, location: str) -> tuple[int, list[str]]:
    """Exit status and output of `verify`."""
    monkeypatch.setattr("sys.argv", ["data_pipeline", "verify", location])
    status = 0
    try:
        main()
    except SystemExit as exit_:
        status = int(str(exit_.code))
    return status, capsys.readouterr().out.splitlines()


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize("scheme", ["http", "file"])
def test_every_location_that_can_be_trained_from_is_verified(
    scheme: str, copy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve(copy) as server:
        location = server.url if scheme == "http" else f"file://{copy}"
        status, lines = said(capsys, monkeypatch, location)
        assert (status, len(lines)) == (0, 1)
        assert lines[0].startswith(f"{location} is sound: 30 samples in 3 shards; ")
        write_members(copy, replace("00000012.png", lambda _: b"")(read_members(copy / SHARD)))
        index_path(copy / "shard-00002.tar").write_bytes(b"other")
        shard = copy / "shard-00000.tar"
        shard.chmod(0o644)
        shard.write_bytes(shard.read_bytes()[:-512] + b"x" * 512)
        status, lines = said(capsys, monkeypatch, location)
    assert status == 1
    assert "shard-00000.tar" in lines[0]
    assert "not the file that the manifest names" in lines[0]
    assert lines[1].startswith(f"{SHARD}: 00000012: 00000012.png does not decode")
    assert (
        lines[2] == "shard-00002.tar: shard-00002.index beside it is not the index that manifest.json names; remove it"
    )
    assert lines[3].startswith(f"{location} has 3 problems: 19 of 30 samples sound in 3 shards; ")
    assert len(lines) == 4


@pytest.mark.usefixtures("no_pauses")
def test_the_assets_of_a_remote_overlay_are_verified(tmp_path: Path) -> None:
    directory = write_tiny_dataset(tmp_path / "online", num_samples=20, overlay="online")
    location = f"file://{directory}"
    assert list(find_problems(location)) == []
    (directory / "overlay.safetensors").write_bytes(b"other")
    [problem] = find_problems(location)
    assert problem.file == "overlay.safetensors"
    assert "not the file that the manifest names" in problem.what


def test_a_location_that_does_not_answer_is_one_sentence() -> None:
    with pytest.raises(UserError, match="ftpx://host/data"):
        Verification("ftpx://host/data")


def test_the_summary_names_samples_bytes_sizes_and_classes(sound: Path, tmp_path: Path) -> None:
    def summary(directory: Path) -> str:
        verification = Verification(directory)
        assert not list(verification.problems())
        return verification.summary

    num_bytes = sum(path.stat().st_size for path in sound.glob("*.tar"))
    counts = load_manifest(sound).counts_overlay
    assert summary(sound) == (
        f"{sound} is sound: 30 samples in 3 shards; {num_bytes:,} bytes; pictures of 3x32x32; "
        f"10 base classes of 3 to 3 samples; 3 overlay classes of {min(counts)} to {max(counts)} samples"
    )
    online = write_tiny_dataset(tmp_path / "online", num_samples=20, overlay="online")
    assert summary(online).endswith("; 3 overlay classes drawn at each reading")
    sounds = write_tiny_sounds(tmp_path / "sounds", num_samples=20)
    assert "; sounds for inputs of 8333 points at 8000 a second; 2 base classes of " in summary(sounds)


@pytest.mark.parametrize("name", ["manifest.json", SHARD, "shard-00001.index", "overlay.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_only_regular_files_are_read(name: str, kind: str, tmp_path: Path) -> None:
    """A pipe would wait for its writer, and /dev/zero has no end."""
    directory = write_tiny_dataset(tmp_path / "data", num_samples=30, num_samples_per_shard=10, overlay="online")
    path = directory / name
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    if name == "manifest.json":
        with pytest.raises(UserError, match=r"holds no manifest\.json"):
            problems(directory)
        return
    [problem] = problems(directory)
    assert problem.startswith(
        f"{SHARD}: {name}" if name.endswith("index") else f"{name}: cannot be read (not a regular"
    )
    if name.endswith("index"):
        assert len(SampleStore(directory)) == 30  # made anew from the tar
    else:
        with pytest.raises(UserError, match=r"no regular file|not a regular file"):
            SampleStore(directory)


def test_a_shard_that_is_a_link_is_read_and_nothing_is_written_through_links(copy: Path, tmp_path: Path) -> None:
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (copy / SHARD).rename(elsewhere / SHARD)
    (copy / SHARD).symlink_to(elsewhere / SHARD)
    index = index_path(copy / SHARD)
    right = index.read_bytes()
    (elsewhere / "notes").write_text("mine")
    index.unlink()
    index.symlink_to(elsewhere / "notes")
    assert not decode(SampleStore(copy), np.arange(30)).bad
    assert (elsewhere / "notes").read_text() == "mine"
    assert sorted(path.name for path in elsewhere.iterdir()) == ["notes", SHARD]
    assert not index.is_symlink()
    assert index.read_bytes() == right
    assert problems(copy) == []


def bomb(height: int, width: int, claimed: tuple[int, int]) -> bytes:
    """A PNG as this project writes it whose header claims another size than its points have."""
    file = bytearray(encode_png(np.zeros((height, width, 3), np.uint8)))
    file[16:24] = struct.pack(">II", claimed[1], claimed[0])
    file[29:33] = struct.pack(">I", zlib.crc32(file[12:29]))
    return bytes(file)


@pytest.mark.slow
@pytest.mark.parametrize("claimed", [(8_000, 8_000), (32, 32)])
def test_a_picture_that_unpacks_to_more_than_is_due_is_not_unpacked(claimed: tuple[int, int], copy: Path) -> None:
    file = bomb(8_000, 8_000, claimed)
    assert len(file) < 1_000_000
    write_members(copy, replace("00000012.png", lambda _: file)(read_members(copy / SHARD)))
    store = SampleStore(copy)
    with memory_limit(64 << 20):
        found = problems(copy)
        bad = decode(store, np.arange(30)).bad
    if claimed == (32, 32):  # as readers of PNG do, torchvision takes the points that are due and leaves the rest
        assert not bad
        assert {problem.split(" is ")[0] for problem in found} == {"manifest.json: mean", "manifest.json: std"}
    else:
        assert [sample.key for sample in bad.values()] == ["00000012"]
        assert [problem.split(": ")[1] for problem in found] == ["00000012"]


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("00000012.json", b" " * 5_000 + b"{}", "00000012.json has 5002 bytes, but at most 256 are allowed"),
        ("00000012.json", b"[" * 200, "00000012.json does not decode"),
        ("00000012.png", bytes(1 << 21), "00000012.png has 2097152 bytes, but at most 1054720 are allowed"),
    ],
)
def test_what_is_too_large_is_not_decoded(name: str, content: bytes, what: str, copy: Path) -> None:
    write_members(copy, replace(name, lambda _: content)(read_members(copy / SHARD)))
    [problem] = problems(copy)
    assert problem.startswith(f"{SHARD}: 00000012: {what}")
    [bad] = decode(SampleStore(copy), np.arange(30)).bad.values()
    assert bad.reason.startswith(what)


def test_a_sound_as_loud_as_a_number_can_be_is_told(tmp_path: Path) -> None:
    directory = write_tiny_sounds(tmp_path / "sounds", num_samples=30, num_samples_per_shard=10, overlay="baked")
    loud = wav(TONE * 1e30, subtype="FLOAT")
    write_members(directory, replace("00000012.wav", lambda _: loud)(read_members(directory / SHARD)))
    [problem] = problems(directory)
    assert problem == f"{SHARD}: 00000012: 00000012.wav holds points beyond 1048576 times full scale"


def test_what_is_no_dataset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        problems(tmp_path / "nowhere")
    with pytest.raises(UserError, match="not a finished dataset"):
        problems(tmp_path)
