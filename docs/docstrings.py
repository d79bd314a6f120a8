"""What the API reference needs beyond mkdocstrings: tables and joint entries, functions named as their module.

Docstrings are written for `help()`, with tables aligned by spaces. HTML would run their lines together, so they become
code blocks. Of attributes that share an entry ("layer, kind: ..."), griffe would take the second for the type of the
first: it splits at a space, so a no-break space stands there.

`heads_kernels.analysis.importance` is a function, imported from the module of the same name. mkdocstrings reads the
sources without importing them and would take that path for the module.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import griffe

_TABLE = re.compile(
    r"^ *={3,}(?: +={3,})+\n(?:.*\n)*? *={3,}(?: +={3,})+\n(?=\s*\n|\Z)"  # ruled
    r"|^(?:\S+ {2,}\S.*\n(?: {4,}\S.*\n)*){2,}",  # aligned with spaces alone
    re.MULTILINE,
)
_JOINT = re.compile(r"^ +\w+(?:, \w+)+: ", re.MULTILINE)


def markdown(docstring: str) -> str:
    """`docstring` with its tables as code blocks, in which backticks mean nothing, and joint entries as one name."""
    text = _JOINT.sub(lambda entry: entry[0].replace(", ", ",\N{NO-BREAK SPACE}"), docstring)
    return _TABLE.sub(_fenced, text.rstrip() + "\n").rstrip()


def _fenced(found: re.Match[str]) -> str:
    return "\n```text\n" + found[0].rstrip().replace("`", "") + "\n```\n"


class Docstrings(griffe.Extension):
    """Edits the package once it is loaded."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: object) -> None:
        modules = [each for each in _objects(pkg) if each.is_module]
        for each in _objects(pkg):
            if each.docstring is not None:
                each.docstring.value = markdown(each.docstring.value)
        for module in modules:
            _uncover(module)


def _objects(parent: griffe.Object) -> Iterator[griffe.Object]:
    yield parent
    for member in parent.members.values():
        if not member.is_alias:
            yield from _objects(member)


def _uncover(package: griffe.Module) -> None:
    """Put what `__all__` exports in place of the modules of the same name."""
    for name, module in list(package.modules.items()):
        if package.imports.get(name) == f"{package.path}.{name}.{name}":
            package.set_member(name, module.members[name])
