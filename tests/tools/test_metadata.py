"""What a distribution says of itself: version, types, public names, and no addresses."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest
from setuptools import Distribution

import heads_kernels as hk

ROOT = Path(__file__).parents[2]


def test_one_version() -> None:
    declared = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert declared is not None
    assert hk.__version__ == declared[1] == importlib.metadata.version("heads_kernels")
    assert f"## {declared[1]}" in (ROOT / "CHANGELOG.md").read_text()


def test_types_are_packaged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    project = Distribution({"src_root": str(ROOT)})
    project.parse_config_files(["pyproject.toml"])
    assert "py.typed" in project.package_data["heads_kernels"]
    assert (ROOT / "heads_kernels" / "py.typed").exists()


def test_everything_public_is_there() -> None:
    assert sorted(hk.__all__) == hk.__all__
    for name in hk.__all__:
        assert hasattr(hk, name)


def test_no_address_of_an_index_or_machine() -> None:
    """Where packages come from is the business of the machine that installs them."""
    for name in (
        "pyproject.toml", "constraints.txt", "Makefile", "setup.py", "csrc/build.py", ".ci/run",
    ):  # fmt: skip
        text = (ROOT / name).read_text()
        assert "://" not in text, name
        assert "index-url" not in text, name
