"""The config of a run is read, although this version would not train with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from configs import resolve_recipe
from data_pipeline.core.errors import UserError
from trainer.config import read_config, read_run_config
from trainer.run_dir import RunDir

# Each breaks a rule between two sections.
UNFIT: dict[str, dict[str, Any]] = {
    "no adversary": {"adversary": None},
    "a batch that micro batches do not divide": {"memory": {"micro_batches": 3}},
    "an objective that compares no groups": {"neighbours": {"group_size": 2}},
}


@pytest.mark.parametrize("name", UNFIT)
def test_a_run_is_read_with_a_warning_and_a_new_one_is_refused(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = resolve_recipe("debug:viewmaker", ["tracking.wandb=disabled"]).model_dump(mode="json")
    values |= UNFIT[name] | {"name": name.replace(" ", "-")}
    run_dir = RunDir(tmp_path)
    run_dir.config.write_text(json.dumps(values))
    with pytest.raises(UserError) as refused:
        read_config(run_dir.config)
    config = read_run_config(run_dir)
    assert config.encoder == resolve_recipe("debug:viewmaker").encoder
    assert f"the run {config.name} has settings with which this version does not train" in caplog.text
    assert str(refused.value).rpartition(": ")[2] in caplog.text
