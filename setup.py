"""Names the C extensions, and compiles their files in parallel; all else is in pyproject.toml."""

import fcntl
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError


class BuildExt(build_ext):
    """Compiles only files that changed, several at a time."""

    def run(self):
        Path("build").mkdir(exist_ok=True)
        with Path("build/lock").open("w") as lock:  # temporary: one build at a time
            fcntl.flock(lock, fcntl.LOCK_EX)
            super().run()

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
        bad = []

        def compile_one(item):
            name, (source, extension) = item
            needs = map(
                Path, (source, "setup.py", *depends, *Path(source).parent.glob("build*.py"))
            )
            newest = max(path.stat().st_mtime for path in needs)
            if not Path(name).exists() or Path(name).stat().st_mtime <= newest:
                try:
                    cc._compile(name, source, extension, cc_args, postargs, pp_opts)
                except CompileError:
                    bad.append(name)

        with ThreadPoolExecutor(self.parallel or os.cpu_count()) as pool:
            list(pool.map(compile_one, build.items()))
        return complete(objects, bad)


def complete(objects, bad):
    """Temporary, while files are still being written by several people.

    Files that do not compile keep their last good object or are left out; functions that are
    missing end the process when they are called instead of failing the import.
    """
    for name in bad:
        state = "its last good object is used" if Path(name).exists() else "left out"
        print(f"WARNING: {name} does not compile: {state}")  # noqa: T201
    objects = [name for name in objects if Path(name).exists()]

    def symbols(*flags):
        command = ["nm", "-P", *flags, *objects]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return {line.split()[0] for line in lines.splitlines() if line.startswith("dk_")}

    missing = sorted(symbols("-u") - symbols("--defined-only", "-g"))
    if missing:
        print("WARNING: not defined yet: " + " ".join(missing))  # noqa: T201
        text = "".join(f".globl {name}\n{name}: ud2\n" for name in missing)
        Path("build/missing.s").write_text(text, encoding="utf-8")
        subprocess.run(["gcc", "-c", "build/missing.s", "-o", "build/missing.o"], check=True)
        objects.append("build/missing.o")
    return objects


setup(
    cmdclass={"build_ext": BuildExt},
    cffi_modules=[
        "edgedsv4/formats/native/build_ext.py:ffibuilder",
        "edgedsv4/kernels/native/build_ext.py:ffibuilder",
    ],
)
