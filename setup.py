"""Names the C extensions, and compiles their files in parallel; all else is in pyproject.toml."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError


class BuildPy(build_py):
    """Puts the C headers, which stand at the top of the checkout, into an installed package too."""

    def run(self):
        super().run()
        if not self.editable_mode:
            folder = Path(self.build_lib, "edgedsv4", "capi", "include")
            folder.mkdir(parents=True, exist_ok=True)
            for header in Path("include").glob("dsv4.h*"):
                shutil.copyfile(header, folder / header.name)


class BuildExt(build_ext):
    """Compiles only files that changed, several at a time."""

    def build_extensions(self):
        command = self.compiler.compiler_so[0]
        if shutil.which(command) is None:
            raise CompileError(f"no C compiler {command!r} found: install gcc or clang, or set CC")
        self.compiler.compile = self.compile_changed
        super().build_extensions()

    def compile_changed(self, sources, output_dir=None, **options):
        """What `CCompiler.compile` does, for distutils calls it by this name."""
        cc = self.compiler
        depends = options.get("depends") or []
        _, objects, postargs, pp_opts, build = cc._setup_compile(
            output_dir,
            options.get("macros"),
            options.get("include_dirs"),
            sources,
            depends,
            options.get("extra_postargs"),
        )
        cc_args = cc._get_cc_args(pp_opts, options.get("debug", 0), options.get("extra_preargs"))

        def compile_one(item):
            name, (source, extension) = item
            newest = max(Path(path).stat().st_mtime for path in (source, "setup.py", *depends))
            if not Path(name).exists() or Path(name).stat().st_mtime <= newest:
                cc._compile(name, source, extension, cc_args, postargs, pp_opts)

        with ThreadPoolExecutor(self.parallel or os.cpu_count()) as pool:
            list(pool.map(compile_one, build.items()))
        return objects


setup(
    cmdclass={"build_ext": BuildExt, "build_py": BuildPy},
    cffi_modules=[
        "edgedsv4/capi/build_ext.py:ffibuilder",
        "edgedsv4/formats/native/build_ext.py:ffibuilder",
        "edgedsv4/formats/native/build_ext.py:reader_builder",
        "edgedsv4/kernels/native/build_ext.py:ffibuilder",
    ],
)
