"""The patches as data, and applying one to a copy of the product's sources.

The copy is an overlay: its folders come first on the module path of the services, so nothing is installed and
the checkout is never touched.
"""

import os
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import yaml

ROOT: Final = Path(__file__).parents[2]
FILE: Final = Path(__file__).with_name("patches.yaml")
ROOMS: Final = ("libs", "services")


class DoesNotApply(Exception):
    """The product has changed: the patch has to be looked at again."""


@dataclass(frozen=True)
class Edit:
    path: str
    old: str
    new: str

    def applied_to(self, text: str) -> str:
        """Raises DoesNotApply unless `old` stands exactly once in the text."""
        if (count := text.count(self.old)) != 1:
            raise DoesNotApply(f"{self.path}: expected once, found {count} times: {self.old!r}")
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Patch:
    """`fails` are the requirements that must fail, each of them."""

    guard: str
    edits: tuple[Edit, ...]
    fails: tuple[str, ...]

    def apply(self, tree: Path) -> None:
        """Raises DoesNotApply; then nothing was written by the edit that does not fit."""
        for edit in self.edits:
            file = tree / edit.path
            file.write_text(edit.applied_to(file.read_text()))


@cache
def all_patches() -> tuple[Patch, ...]:
    return tuple(
        Patch(
            each["guard"],
            tuple(Edit(edit["path"], edit["old"], edit["new"]) for edit in (each, *each.get("also", ()))),
            tuple(each["fails"].split()),
        )
        for each in yaml.safe_load(FILE.read_text())
    )


def copy_sources(into: Path) -> None:
    """Sources with their compiled files, so that services start as fast as from the checkout."""
    for room in ROOMS:
        for source in sorted((ROOT / room).glob("*/src")):
            shutil.copytree(source, into / source.relative_to(ROOT), ignore=_changed_meanwhile)


def _changed_meanwhile(_: str, names: list[str]) -> list[str]:
    """Files that compilers and formatters write beside others for a moment."""
    return [name for name in names if name.endswith((".tmp", "~")) or ".pyc." in name]


def module_path(tree: Path) -> str:
    """PYTHONPATH of a process that runs these sources."""
    return os.pathsep.join(str(path) for room in ROOMS for path in sorted((tree / room).glob("*/src")))
