"""The tiny model that comes with the package, for demonstrations and tests without a download."""
