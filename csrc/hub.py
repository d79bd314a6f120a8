"""The operators as a kernel for Hugging Face's Kernel Hub (`setup.py hub`).

The Hub's `kernels` loads a folder by path under a name of its own, so that one process can load several versions. The
folder holds the Python files of the operators, with relative imports; the namespace of the ops is the name of the
package. There is no compiled code: on a GPU the Triton kernels run, on a CPU the formula.

`kernels` loads build/torch-cuda or build/torch-cpu; kernel-builder, which uploads, reads build.toml and torch-ext.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import re
import shutil
from pathlib import Path

PACKAGE = Path("heads_kernels")
#: `kernels` loads the one that torch was built for.
BACKENDS = ("cuda", "cpu")
_IMPORT = re.compile(rf"^( *)from {PACKAGE}([\w.]*) import", re.MULTILINE)
_BUILD = """\
[general]
name = "heads-kernels"
version = 0
edition = 5
license = "Apache-2.0"
backends = [{backends}]

[torch-noarch]
pyext = ["json", "py"]
"""


def sources(version: str, commit: str) -> dict[Path, str]:
    """The text of each file, by its path in the package."""
    folders = [PACKAGE.glob("*.py"), *((PACKAGE / name).rglob("*.py") for name in ("mask", "ops"))]
    paths = sorted(path.relative_to(PACKAGE) for folder in folders for path in folder)
    paths.remove(Path("__main__.py"))
    texts = {path: relative((PACKAGE / path).read_text(), len(path.parts)) for path in paths}
    texts[Path("__init__.py")] = operators((PACKAGE / "__init__.py").read_text())
    missing = {"missing": "a kernel of the Hub has no compiled code"}
    built = {"version": version, "commit": commit, "cpu": missing, "cuda": missing}
    texts[Path("build.json")] = json.dumps(built, indent=1) + "\n"
    return texts


def relative(text: str, depth: int) -> str:
    """`text` of a file in `depth` folders, the package among them, with relative imports of the package."""
    return _IMPORT.sub(lambda found: f"{found[1]}from {'.' * depth}{found[2][1:]} import", text)


def operators(text: str) -> str:
    """`__init__.py` of the package without the modules that it imports on first use."""
    body = ast.parse(text).body
    imports = [node for node in body if isinstance(node, ast.ImportFrom) and str(node.module).startswith(f"{PACKAGE}.")]
    names = sorted(each.name for node in imports for each in node.names)
    lines = [ast.unparse(node) for node in imports]
    return relative("\n".join([*lines, "", f"__all__ = {names}", ""]), 1)


def write(into: Path, version: str, commit: str) -> None:
    """Write the folder, which is replaced."""
    shutil.rmtree(into, ignore_errors=True)
    texts = sources(version, commit)
    for backend in BACKENDS:
        folder = into / "build" / f"torch-{backend}"
        for path, text in texts.items():
            _write(folder / path, text)
        digests = {
            str(path): base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for path, text in texts.items()
        }
        metadata = {
            "name": "heads-kernels",
            "id": f"_{PACKAGE}_{backend}_{commit[:7]}",
            "version": 0,
            "license": "Apache-2.0",
            "python-depends": [],
            "backend": {"type": backend},
            "digest": {"algorithm": "sha256", "files": digests},
        }
        _write(folder / "metadata.json", json.dumps(metadata, indent=1) + "\n")
    for path, text in texts.items():
        _write(into / "torch-ext" / PACKAGE / path, text)
    backends = ", ".join(f'"{backend}"' for backend in BACKENDS)
    _write(into / "build.toml", _BUILD.format(backends=backends))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
