"""What the log says before step 0."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from configs import resolve_recipe
from data_pipeline.manifest import load_manifest
from tests.tiny_data import write_tiny_pair
from trainer.players import build_players
from trainer.preflight import log_start

X86 = {"architecture": "x86_64"}


@pytest.mark.parametrize(
    ("precision", "processor", "is_slow"),
    [
        ("bfloat16", X86 | {"avx512_bf16": False, "amx_bf16": False}, True),
        ("bfloat16", X86 | {"avx512_bf16": True, "amx_bf16": False}, False),
        ("bfloat16", {"architecture": "aarch64"}, False),
        ("float32", X86 | {"avx512_bf16": False, "amx_bf16": False}, False),
    ],
)
def test_bfloat16_on_a_processor_without_it_is_called_slow(
    precision: str,
    processor: dict[str, bool | str],
    is_slow: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: processor)
    pair = write_tiny_pair(tmp_path, num_train=16, num_test=16)
    config = resolve_recipe("debug:image", [f"precision={precision}"])
    manifest = load_manifest(pair / "train")
    log_start(config, build_players(config), manifest, device=torch.device("cpu"), start_step=0, num_steps=1)
    assert ("no instructions for bfloat16" in caplog.text) is is_slow
