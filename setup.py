"""Compile the C++ library with the package; everything else is in pyproject.toml.

CREDIBLY_VARIANTS=all compiles every instruction set, for wheels that are to run on other machines. CREDIBLY_NATIVE=0
compiles nothing.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

PACKAGE = Path("credibly", "backends", "cpp")
# build.py imports nothing but the standard library; its package would import torch.
sys.path.insert(0, os.fspath(Path(__file__).parent / "src" / PACKAGE))
import build  # noqa: E402


class BuildLibrary(build_ext):
    """Compile the library into the folder of the wheel, or beside its sources for an editable installation."""

    def run(self) -> None:
        """Compile. Failure is recorded in the manifest and does not stop the installation."""
        if os.environ.get("CREDIBLY_NATIVE", "1") != "0":
            build.build(self._folder(), os.environ.get("CREDIBLY_VARIANTS", ""))

    def _folder(self) -> Path:
        return Path("src" if self.inplace else self.build_lib) / PACKAGE / build.FOLDER

    def get_outputs(self) -> list[str]:
        """Return the files of the library."""
        folder = self._folder()
        return [os.fspath(path) for path in folder.iterdir()] if folder.is_dir() else []

    def get_output_mapping(self) -> dict[str, str]:
        """Return no files: an editable installation compiles in place."""
        return {}


class Wheel(bdist_wheel):
    """A wheel for every Python 3 of one platform: the library does not use Python's binary interface."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tag of the wheel."""
        return "py3", "none", super().get_tag()[2]


setup(
    # Without sources: BuildLibrary compiles them. An entry makes the wheel one of this platform.
    ext_modules=[Extension("credibly.backends.cpp.library", [])],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": Wheel},
)
