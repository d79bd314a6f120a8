"""A process that runs items: one JSON line asks for an item on stdin, one JSON line answers on stdout.

    python -m benchmarks.gpu.worker SETTINGS_AS_JSON

An item that breaks the CUDA context ends the process after its answer; the pool starts another.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from importlib import import_module

import torch

from benchmarks.gpu.settings import (
    FAILED,
    PASSED,
    REFUSED,
    SKIPPED,
    Refused,
    Row,
    Settings,
    Skipped,
)
from benchmarks.gpu.stages import STAGES, TUNING

_DETAIL = 1500  # characters of an error that are kept


def run_item(settings: Settings, stage: str, name: str) -> Row:
    """The row of one item; whatever it raises becomes a verdict."""
    started = time.perf_counter()
    row: Row = {"name": name, "verdict": PASSED}
    try:
        module = import_module({**STAGES, **TUNING}[stage].module)
        row.update(module.items(settings)[name]())
        if settings.on_gpu:
            torch.cuda.synchronize()  # an asynchronous error is this item's
    except Refused as reason:
        row.update(verdict=REFUSED, detail=str(reason))
    except Skipped as reason:
        row.update(verdict=SKIPPED, detail=str(reason))
    except Exception as error:
        places = "".join(traceback.format_tb(error.__traceback__)[-2:])
        message = f"{type(error).__name__}: {error}"
        row.update(verdict=FAILED, detail=f"{message[:_DETAIL]}\n{places[-_DETAIL:]}")
        row["fatal"] = settings.on_gpu and _broken()
    row["seconds"] = round(time.perf_counter() - started, 3)
    return row


def _broken() -> bool:
    """Whether the CUDA context is lost; frees what the failed item held where it is not."""
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except Exception:
        return True
    return False


def main() -> int:
    settings = Settings.from_json(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool ends its workers
    # What a library prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    torch.set_num_threads(1)  # many workers share the cores
    if settings.on_gpu:
        torch.cuda.synchronize()  # opens the GPU

    def answer(row: Row) -> None:
        answers.write(json.dumps(row) + "\n")
        answers.flush()

    answer({"ready": True})
    for line in sys.stdin:
        asked = json.loads(line)
        row = run_item(settings, asked["stage"], asked["name"])
        answer(row)
        if row.get("fatal"):
            return 1
        if settings.on_gpu:
            torch.cuda.empty_cache()  # several workers share the memory
    return 0


if __name__ == "__main__":
    sys.exit(main())
