"""Jobs in forks: each begins with everything imported and no device touched, and leaves nothing behind when it ends."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def in_a_fork(work: Callable[[], Mapping[str, Any]], result: Path) -> bool:
    """Does work in a fork of this process and waits for its end; returns whether all went well.

    Args:
        work: Returns what is fit for JSON.
        result: Where that goes; the traceback of a failure goes beside it, as ``.error``.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            result.write_text(json.dumps(work()), encoding="utf-8")
            code = 0
        except BaseException:
            result.with_suffix(".error").write_text(traceback.format_exc(), encoding="utf-8")
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return status == 0
