"""Names the C extensions; everything else is in pyproject.toml."""

from setuptools import setup

setup(cffi_modules=["edgedsv4/formats/native/build_ext.py:ffibuilder"])
