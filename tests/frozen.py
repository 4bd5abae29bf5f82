"""Take all objects that exist when this is imported out of garbage collection.

Import it last in a process that forks others: what is imported before is neither searched nor copied by their garbage
collection.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
