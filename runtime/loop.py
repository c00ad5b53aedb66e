"""What a process of the runtime wants of Python: which event loop, and what its garbage collector need not look at."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


NEW_OBJECTS = 50_000  # between two looks for garbage in cycles; a request makes some thousand


def freeze_start() -> None:
    """Call once everything is up. What has been loaded stays; to walk through it takes the loop 40 ms each time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, *gc.get_threshold()[1:])
