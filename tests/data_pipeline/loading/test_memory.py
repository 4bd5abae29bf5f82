from __future__ import annotations

import multiprocessing
import os
import resource
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.core.batch import Batch
from data_pipeline.loading.stream import ReadConfig, Stream
from tests.data_pipeline.loading.batches import noise
from tests.tiny_data import damage, write_tiny_dataset, write_tiny_sounds

NUM_SAMPLES = 320
NUM_EPOCHS = 10
GLOBAL_BATCH_SIZE = 16
# In bytes. What a worker decodes after the warm-up takes 4.5 MB, and the sounds that this process keeps take 100 MB.
MAX_GROWTH_OF_WORKER, MAX_GROWTH_HERE = 3 << 20, 24 << 20


@pytest.mark.slow
@pytest.mark.parametrize(("medium", "placement", "num_workers"), [("pictures", "stream", 2), ("sounds", "host", 0)])
def test_memory_and_descriptors_stay_flat_over_epochs(
    medium: str, placement: Any, num_workers: int, tmp_path: Path
) -> None:
    """Twenty shards with an online overlay and a bad sample."""
    directory = tmp_path / "dataset"
    if medium == "pictures":
        write_tiny_dataset(directory, num_samples=NUM_SAMPLES, overlay="online")
    else:
        write_tiny_sounds(directory, num_samples=NUM_SAMPLES, overlay=noise())
    damage(directory, [33])
    stream = Stream(
        directory,
        read=ReadConfig(num_workers=num_workers, placement=placement, max_bad_share=0.01),
        global_batch_size=GLOBAL_BATCH_SIZE,
        seed=0,
        end_step=NUM_EPOCHS * NUM_SAMPLES // GLOBAL_BATCH_SIZE,
        overlay_draw="per_view",
    )
    batches = iter(stream)
    early = usage_after(islice(batches, 2 * stream.num_steps_per_epoch))
    late = usage_after(islice(batches, (NUM_EPOCHS - 3) * stream.num_steps_per_epoch))
    assert len(early) == 1 + num_workers
    assert early.keys() == late.keys()
    for pid, (num_files, resident) in late.items():
        # Each batch on its way has a descriptor for each of its tensors; a leak would be hundreds.
        assert num_files - early[pid][0] <= 12 * num_workers
        assert resident - early[pid][1] <= (MAX_GROWTH_HERE if pid == os.getpid() else MAX_GROWTH_OF_WORKER)


def usage_after(batches: Iterator[Batch]) -> dict[int, tuple[int, int]]:
    """Open descriptors and resident bytes of this process and its workers, once `batches` were read."""
    for _ in batches:
        pass
    pids = [os.getpid(), *(child.pid or 0 for child in multiprocessing.active_children())]
    return {
        pid: (
            len(list(Path(f"/proc/{pid}/fd").iterdir())),
            int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize(),
        )
        for pid in pids
    }
