"""`python -m tests.support.gpu_worker SETTINGS`: `benchmarks.gpu.worker`, with the corrected interpreter of Triton."""

import sys

from benchmarks.gpu import worker
from tests.support import interpreter

if __name__ == "__main__":
    interpreter.correct()
    sys.exit(worker.main())
