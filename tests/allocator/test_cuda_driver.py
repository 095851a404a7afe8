"""The one call of the driver that is made by its address: what it is handed, and what becomes of its errors."""

from __future__ import annotations

import ctypes
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_cuda_driver import FakeCudaDriver

from pagetide.allocator.cuda_driver import _MemcpyBatch, uses_host_pointers
from pagetide.allocator.errors import DriverError


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1


class Attributes:
    """As the bindings have them: 24 bytes of C, of which the first and the last number matter."""

    def __init__(self) -> None:
        self._words = (ctypes.c_uint32 * 6)()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("srcAccessOrder", "flags"):
            self._words[0 if name == "srcAccessOrder" else 5] = int(value)
        else:
            super().__setattr__(name, value)

    def getPtr(self) -> int:
        return ctypes.addressof(self._words)


class Bindings(SimpleNamespace):
    """What is used of cuda.bindings.driver, with a C function behind the address. `seen` is what that was handed last."""

    def __init__(self) -> None:
        pointer, number = ctypes.c_void_p, ctypes.c_size_t
        prototype = ctypes.CFUNCTYPE(
            ctypes.c_int, pointer, pointer, pointer, number, pointer, pointer, number, pointer, pointer
        )
        self._function = prototype(self._copy)
        self.seen: dict[str, Any] = {}
        super().__init__(
            CUresult=CUresult,
            CUmemcpyAttributes=Attributes,
            CUmemcpySrcAccessOrder=SimpleNamespace(CU_MEMCPY_SRC_ACCESS_ORDER_STREAM=1),
            CUmemcpyFlags=SimpleNamespace(CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE=1),
        )

    def cuGetProcAddress(self, name: bytes, version: int, flags: int) -> tuple[CUresult, int, int]:
        assert (name, flags) == (b"cuMemcpyBatchAsync", 0)
        found = version == 12080  # another one has other arguments
        return CUresult.CUDA_SUCCESS, ctypes.cast(self._function, ctypes.c_void_p).value if found else 0, 0

    def _copy(self, *given: Any) -> int:
        targets, sources, sizes, count, attributes, first, num_attributes, failed, stream = given
        words = (ctypes.c_uint32 * 6).from_address(attributes)[:]
        self.seen = {"count": count, "attributes": words, "num": num_attributes, "stream": stream}
        self.seen["first"] = ctypes.c_size_t.from_address(first).value
        if stream is None:
            ctypes.c_size_t.from_address(failed).value = 0
            return CUresult.CUDA_ERROR_INVALID_VALUE
        columns = [(ctypes.c_uint64 * count).from_address(numbers)[:] for numbers in (targets, sources, sizes)]
        for copy in zip(*columns, strict=True):
            ctypes.memmove(*copy)
        return CUresult.CUDA_SUCCESS


def test_a_batch_is_handed_arrays_and_one_set_of_attributes() -> None:
    bindings = Bindings()
    batch = _MemcpyBatch(bindings)
    source, target = np.arange(100, dtype=np.uint8), np.zeros(100, np.uint8)
    targets, sources = target.ctypes.data + np.array([5, 50]), source.ctypes.data + np.array([1, 90])
    sizes = np.array([3, 4])
    batch(*(array.ctypes.data for array in (targets, sources, sizes)), 2, 77)
    assert bindings.seen == {"count": 2, "attributes": [1, 0, 0, 0, 0, 1], "num": 1, "stream": 77, "first": 0}
    assert np.flatnonzero(target).tolist() == [5, 6, 7, 50, 51, 52, 53]
    assert target[[5, 6, 7, 50, 51, 52, 53]].tolist() == [1, 2, 3, 90, 91, 92, 93]


def test_what_the_driver_says_is_raised() -> None:
    with pytest.raises(DriverError, match="cuMemcpyBatchAsync with CUDA_ERROR_INVALID_VALUE") as caught:
        _MemcpyBatch(Bindings())(0, 0, 0, 1, 0)
    assert caught.value.code == 1


@pytest.mark.parametrize("older", ["driver", "bindings"])
def test_what_is_older_than_the_call_is_refused(older: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bindings = Bindings()
    if older == "driver":
        monkeypatch.setattr(bindings, "cuGetProcAddress", lambda *given: (CUresult.CUDA_SUCCESS, 0, 1))
    else:
        del bindings.CUmemcpyAttributes
    with pytest.raises(DriverError, match=r"it came with CUDA 12\.8") as caught:
        _MemcpyBatch(bindings)
    assert caught.value.code == 500


@pytest.mark.parametrize("answer", [True, False])
def test_a_device_says_whether_it_takes_the_hosts_addresses(answer: bool) -> None:
    assert uses_host_pointers(FakeCudaDriver(host_pointers=answer), 0) is answer
