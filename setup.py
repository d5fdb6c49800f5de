"""Package list only (everything else is in pyproject.toml): conf/ is installed as dualpace/conf."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["dualpace", "dualpace.*"]), "dualpace.conf"],
    package_dir={"dualpace.conf": "conf"},
    package_data={"dualpace.conf": ["**/*.yaml"]},
)
