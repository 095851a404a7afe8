"""Builds the native kernels (native/build.py) into wheels and editable installs. Everything else is in pyproject.toml."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

_spec = importlib.util.spec_from_file_location("native_build", Path(__file__).parent / "src/pagetide/native/build.py")
native_build = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(native_build)


# As at run time. pip shows nothing of a build: .ci/setup.py installs with 0, and builds the library before the user's eyes.
WITH_LIBRARY = os.environ.get("PAGETIDE_NATIVE") != "0"


class BuildPy(build_py):
    """Adds the library: to the checkout for an editable install, else to what becomes the wheel."""

    def run(self) -> None:
        super().run()
        if not WITH_LIBRARY:
            return
        folder = None if self.editable_mode else Path(self.build_lib, "pagetide", "native")
        native_build.try_to_build(native_build.LIBRARY if folder is None else folder / native_build.LIBRARY.name)


class WithLibrary(Distribution):
    """The library goes where a platform's files go, which auditwheel asks for."""

    def has_ext_modules(self) -> bool:
        return WITH_LIBRARY and native_build.obstacle() is None


class BdistWheel(bdist_wheel):
    """A wheel with the library is for one platform, and for any Python 3 on it."""

    def get_tag(self) -> tuple[str, str, str]:
        tag = super().get_tag()
        return tag if self.root_is_pure else ("py3", "none", tag[2])


setup(distclass=WithLibrary, cmdclass={"build_py": BuildPy, "bdist_wheel": BdistWheel})
