"""The version of pagetide, in a module that imports nothing, so that every package may read it."""

__version__ = "0.1.0"
