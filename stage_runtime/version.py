"""Version of the installed omnistage distribution."""

from importlib.metadata import version

VERSION = version("omnistage")
