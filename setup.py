"""Everything is in pyproject.toml; this file is where the native extension is going to be built."""

from setuptools import setup

setup()
