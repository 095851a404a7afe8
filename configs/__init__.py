"""Files that are not code: the model names of `models.yaml`."""
