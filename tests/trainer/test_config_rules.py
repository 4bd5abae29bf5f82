"""Training refuses a config whose sections do not fit each other; a run with such a config is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from configs import resolve_recipe
from data_pipeline.core.errors import UserError
from trainer.config import read_run_config
from trainer.config_rules import check_sections
from trainer.run_dir import RunDir


def test_a_run_is_read_that_would_not_be_trained(tmp_path: Path) -> None:
    values = resolve_recipe("debug:viewmaker").model_dump(mode="json") | {"adversary": None}
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = read_run_config(RunDir(tmp_path))
    assert config.encoder == resolve_recipe("debug:viewmaker").encoder
    with pytest.raises(UserError, match=r"here: .*adversary"):
        check_sections(config, where="here")
