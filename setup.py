"""Packages are found; the recipes of the repository's top folder are installed as `dappr_llm.recipes`."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["dappr_llm", "dappr_llm.*"]), "dappr_llm.recipes"],
    package_dir={"dappr_llm.recipes": "recipes"},
)
