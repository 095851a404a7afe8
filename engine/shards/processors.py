"""Logits processors of the user's, on their way to the process that samples.

Functions and classes of a module go by its name, and are imported there. What is defined in the program itself, or within a
function, cannot be found by another process: `cloudpickle`, if it is installed, sends its code.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

from ...common.error_text import install_command
from ...scheduler.request import LogitsProcessor, RequestRejected

_INSTALL = install_command("shards")


class SerializedProcessor:
    """A logits processor as bytes. In the process that calls it it becomes itself again, at the first call.

    Calling it raises what unpickling raises: that ends its request, as any error of a processor does.
    """

    def __init__(self, data: bytes, name: str) -> None:
        self.data = data
        self.__qualname__ = name
        self._processor: Any = None

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        if self._processor is None:
            self._processor = pickle.loads(self.data)
        return self._processor(input_ids, scores)


def serialized(processor: LogitsProcessor) -> SerializedProcessor:
    """`processor` for another process. Raises RequestRejected if it cannot be sent there."""
    name = getattr(processor, "__qualname__", type(processor).__name__)
    if isinstance(processor, SerializedProcessor):
        return processor
    try:
        import cloudpickle
    except ImportError:
        cloudpickle = None
    try:
        data = _by_name(processor) if cloudpickle is None else cloudpickle.dumps(processor)
    except Exception as error:  # of the object's own pickling, for example
        how = "define it in a module" if cloudpickle is not None else f"define it in a module, or {_INSTALL}"
        raise RequestRejected(
            f"the logits processor {name} cannot be sent to the process that samples ({type(error).__name__}: {error}): the "
            f"model is divided over several; {how}"
        ) from error
    return SerializedProcessor(data, name)


def _by_name(processor: Any) -> bytes:
    """As plain pickle does it. Raises pickle.PicklingError for what is defined in the program itself."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(processor)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if getattr(obj, "__module__", None) == "__main__" and hasattr(obj, "__qualname__"):
            raise pickle.PicklingError(f"{obj.__qualname__} is defined in the program itself, which other processes do not run")
        return NotImplemented
