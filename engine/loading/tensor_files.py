"""Tensors of a checkpoint's safetensors files by name: views of the mapped files, which are read on first use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..errors import CheckpointError


class TensorFiles:
    """The files stay mapped as long as this object or a tensor of theirs is used."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._files: dict[str, Any] = {}  # by name of a tensor
        for path in paths:
            try:
                file = safe_open(path, "pt")
                self._files |= dict.fromkeys(file.keys(), file)
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} cannot be read ({error}); fetch or save it again") from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __getitem__(self, name: str) -> torch.Tensor:
        """The tensor of this name. Raises CheckpointError."""
        try:
            tensor: torch.Tensor = self._files[name].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{name} cannot be read ({error}); fetch or save the model again") from error
        return tensor
