"""Python in processes of its own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def python(
    *arguments: object, status: int = 0, cwd: Path = ROOT, timeout: float | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Started with these arguments and variables; all that it printed is the message where it ends otherwise.

    `timeout` is in seconds.
    """
    done = subprocess.run([sys.executable, *map(str, arguments)], cwd=cwd, text=True, check=False,
        timeout=timeout, env={**os.environ, **environment}, capture_output=True)  # fmt: skip
    assert done.returncode == status, done.stdout + done.stderr
    return done
