"""Leave records out that cannot be read, as far as the user allows it, and list all of them in one file."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from data_pipeline.core.errors import UserError

logger = logging.getLogger(__name__)

_NUM_NAMED: Final = 10  # in a sentence


def leave_out(reasons: Sequence[str], directory: Path, *, skip_bad: int) -> None:
    """List why records cannot be read in the file `DIRECTORY.bad.txt`, and warn of them; without any, remove the file.

    Raises `UserError` if there are more than `skip_bad`.
    """
    listing = directory.with_name(f"{directory.name}.bad.txt")
    if not reasons:
        listing.unlink(missing_ok=True)
        return
    listing.parent.mkdir(parents=True, exist_ok=True)
    listing.write_text("".join(f"{reason}\n" for reason in reasons), errors="surrogateescape")
    said = f"{'; '.join(reasons[:_NUM_NAMED])}{'; ...' if len(reasons) > _NUM_NAMED else ''}; see {listing}"
    if len(reasons) > skip_bad:
        raise UserError(
            f"{len(reasons)} records cannot be used: {said}, which lists all; mend or remove them, or leave them out "
            f"with --skip-bad {len(reasons)}"
        )
    logger.warning("left out %d records that cannot be used: %s", len(reasons), said)
