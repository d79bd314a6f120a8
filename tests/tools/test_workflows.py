"""The workflows of .github: actions by commit, and what a release takes from the changelog."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import heads_kernels as hk

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_actions_are_named_by_commit() -> None:
    """With the version as a comment: the same everywhere, or Dependabot would renew one and leave the other."""
    versions: dict[str, set[str]] = {}
    for path in WORKFLOWS:
        for line in path.read_text(encoding="utf-8").splitlines():
            if "uses:" not in line:
                continue
            found = re.search(r"uses: (\S+)@([0-9a-f]{40}) # (v\d+\.\d+\.\d+)$", line)
            assert found is not None, f"{path.name}: {line}"
            versions.setdefault(found[1], set()).add(f"{found[2]} {found[3]}")
    assert "actions/checkout" in versions
    assert all(len(used) == 1 for used in versions.values()), versions


@pytest.mark.skipif(shutil.which("awk") is None, reason="needs awk")
def test_notes_of_a_release(tmp_path: Path) -> None:
    """The section of one version, without its heading."""
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    command = re.search(r"^ +(awk .+)$", text, re.MULTILINE)
    assert command is not None

    def notes(version: str) -> list[str]:
        environment = {"GITHUB_REF_NAME": f"v{version}", "PATH": "/bin:/usr/bin"}
        subprocess.run(["bash", "-c", command[1]], cwd=tmp_path, env=environment, check=True)
        return (tmp_path / "notes.md").read_text(encoding="utf-8").splitlines()

    changelog = tmp_path / "CHANGELOG.md"
    changelog.write_text("# Log\n\n## 1.2.0 - today\n- a\n### Fixed\n- b\n\n## 1.1.0\n- c\n")
    assert notes("1.2.0") == ["- a", "### Fixed", "- b", ""]
    assert notes("1.1.0") == ["- c"]
    assert notes("1.2") == []
    shutil.copy(ROOT / "CHANGELOG.md", changelog)
    assert len(notes(hk.__version__)) > 2
