"""The distribution's version."""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("fastgen")
except PackageNotFoundError:  # running from a source tree that is not installed
    VERSION = "0+source"
