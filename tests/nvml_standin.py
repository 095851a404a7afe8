"""A driver library for machines without a driver: compiles nvml_standin.c and tells it what to answer, call by call.

    with NvmlStandin(tmp_path) as nvml:
        nvml.devices = [Gpu("GPU-a", "00000000:3B:00.0", free_bytes=60 * GIB), Gpu("GPU-b", "00000000:1A:00.0")]
        subprocess.run([...], env=nvml.env())           # real dlopen("libnvidia-ml.so.1") in a process of its own
        with nvml.in_process():                         # or here: pynvml talks to the stand-in inside this block
            ...
        nvml.update("1", free_bytes=0)                  # seen by the next call, in every process
        nvml.update("0", error=pynvml.NVML_ERROR_GPU_IS_LOST)
        nvml.update("0", latency_us=2_000_000)          # every call about it; latencies_us={function: us} for some
        nvml.update("0", latency_us=0)                  # ends the waiting of calls under way, too
        nvml.driver_loaded = False                      # calls: UNINITIALIZED, nvmlInit: DRIVER_NOT_LOADED
        nvml.driver_loaded = True                       # nvmlInit works again, handles of before are invalid
        nvml.errors = {"nvmlDeviceGetMemoryInfo_v2": pynvml.NVML_ERROR_FUNCTION_NOT_FOUND}      # an old driver
        nvml.calls("nvmlDeviceGetUUID", "0")            # how often it was begun, over all processes

A device is named by its index as the monitor shows it: "0" is the first of `devices`, "0:1" the second of its
MIG instances. `None` for a quantity is NVML's NOT_SUPPORTED. A latency is slept, and a short sleep takes some 50 µs longer
than told (the timer slack of the kernel). The compiled library lasts as long as this process. It needs a C compiler:
`COMPILER` is None without one.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import mmap
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pynvml

GIB = 1 << 30
COMPILER = next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), None)

_SOURCE = Path(__file__).with_name("nvml_standin.c")
_FUNCTIONS = tuple(re.findall(r"\bX\((nvml\w+)\)", _SOURCE.read_text()))
_MAX_GPUS, _MAX_MIG, _ANSWER_MAX = 16, 8, 64 * ctypes.sizeof(pynvml.c_nvmlProcessInfo_v2_t)
_SLOTS = _MAX_GPUS * (1 + _MAX_MIG)
_NOT_SUPPORTED = 3
_NOT_AVAILABLE = 2**64 - 1
_NO_INSTANCE = 2**32 - 1


@dataclass(frozen=True)
class Process:
    """A process on a device; `used_bytes` None is NVML's "not available"."""

    pid: int
    used_bytes: int | None = None


@dataclass(frozen=True)
class Gpu:
    """What the driver says of a GPU, or of a MIG instance (which `instance` makes).

    `error` is the answer to every call about it, `errors` to some, and goes before it (0 for: no error). `mig` is None
    on a GPU that is not split; of an instance that is None there (destroyed), NVML says NOT_FOUND.
    """

    uuid: str
    pci_id: str = "00000000:01:00.0"
    name: str = "Stand-in A100"
    total_bytes: int | None = 80 * GIB
    free_bytes: int = 80 * GIB
    reserved_bytes: int = 0  # of what is not free
    utilization_percent: int | None = 0
    temperature_celsius: int | None = 30
    power_milliwatts: int | None = 60_000
    power_limit_milliwatts: int | None = 400_000
    compute: Sequence[Process] | None = ()
    graphics: Sequence[Process] | None = ()
    samples: Sequence[tuple[int, int, int]] | None = None  # of load by process: (pid, time in µs, percent)
    mig: Sequence[Gpu | None] | None = None
    error: int = 0
    errors: Mapping[str, int] = field(default_factory=dict)
    latency_us: int = 0
    latencies_us: Mapping[str, int] = field(default_factory=dict)


def instance(uuid: str, **told: Any) -> Gpu:
    """A MIG instance: NVML gives memory and processes, but neither load nor temperature nor power."""
    silent: dict[str, Any] = dict.fromkeys(
        ("utilization_percent", "temperature_celsius", "power_milliwatts", "power_limit_milliwatts")
    )
    told = {"name": "Stand-in A100 MIG 1g.10gb", "total_bytes": 10 * GIB, "free_bytes": 10 * GIB} | silent | told
    return Gpu(uuid, **told)


class NvmlStandin:
    """One stand-in driver, told by a control file in `folder`. Use it in a `with` statement.

    Raises RuntimeError where there is no C compiler.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.library = _library()
        self.control = Path(folder) / "nvml_standin.control"
        self._devices: list[Gpu] = []
        with self.control.open("wb") as file:
            file.truncate(ctypes.sizeof(_File))
        with self.control.open("r+b") as file:
            self._mapped = mmap.mmap(file.fileno(), 0)
        self._file = _File.from_buffer(self._mapped)
        self._file.control.driver_version = b"580.82.07"
        self._file.control.loaded = self._file.control.generation = 1

    def __enter__(self) -> NvmlStandin:
        return self

    def __exit__(self, *_: object) -> None:
        del self._file, self._mapped  # unmapped once no reference is left, in a traceback for instance
        self.control.unlink()

    @property
    def devices(self) -> Sequence[Gpu]:
        return tuple(self._devices)

    @devices.setter
    def devices(self, devices: Sequence[Gpu]) -> None:
        if len(devices) > _MAX_GPUS or any(len(gpu.mig or ()) > _MAX_MIG for gpu in devices):
            raise ValueError(f"the stand-in has room for {_MAX_GPUS} GPUs of {_MAX_MIG} MIG instances each")
        self._devices = list(devices)
        with self._writing() as control:
            control.num_gpus = len(devices)
            for number in range(_MAX_GPUS):
                self._write_gpu(number)

    def update(self, index: str, **changes: Any) -> None:
        """Change what is told of the device `index` ("0", "0:1")."""
        number, *rest = map(int, index.split(":"))
        gpu = self._devices[number]
        if rest:
            instances = list(gpu.mig or ())
            instances[rest[0]] = replace(instances[rest[0]], **changes)  # type: ignore[type-var]
            changes = {"mig": instances}
        self._devices[number] = replace(gpu, **changes)
        with self._writing():
            self._write_gpu(number)

    def _load(self, loaded: bool) -> None:
        with self._writing() as control:
            control.generation += loaded and not control.loaded
            control.loaded = loaded

    def _set_version(self, version: str) -> None:
        with self._writing() as control:
            control.driver_version = version.encode()

    def _set_errors(self, errors: Mapping[str, int]) -> None:
        with self._writing() as control:
            control.errors[:] = [_known(errors).get(function, 0) for function in _FUNCTIONS]

    # To be told, and not asked. A driver that comes back is another one: it has to be initialised anew.
    driver_loaded, driver_version, errors = (property(None, _load), property(None, _set_version), property(None, _set_errors))

    def env(self) -> dict[str, str]:
        """The environment of this process, for a child whose driver library is the stand-in."""
        folders = [str(self.library.parent), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        return {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(folders), "NVML_STANDIN_CONTROL": str(self.control)}

    @contextlib.contextmanager
    def in_process(self) -> Iterator[None]:
        """Within the block, pynvml of this process talks to the stand-in, and knows nothing of what it loaded before."""

        def forget(library: Any) -> Any:
            before, pynvml.nvmlLib = pynvml.nvmlLib, library
            pynvml._nvmlGetFunctionPointer_cache.clear()
            pynvml._nvmlLib_refcount = 0
            return before

        # Not by dlopen's search, which a process reads at its start and which would leave the stand-in to all others
        # here who ask for the real library.
        before = forget(ctypes.CDLL(str(self.library)))
        os.environ["NVML_STANDIN_CONTROL"] = str(self.control)
        try:
            yield
        finally:
            forget(before)
            del os.environ["NVML_STANDIN_CONTROL"]

    def calls(self, function: str, index: str | None = None) -> int:
        """How often the NVML function was begun: for the GPU `index`, or for none (nvmlInitWithFlags, ...)."""
        slot = _SLOTS if index is None else int(index) * (1 + _MAX_MIG)
        return int(self._file.counts[slot][_FUNCTIONS.index(function)])

    @contextlib.contextmanager
    def _writing(self) -> Iterator[_Control]:
        """While the sequence number is odd, readers wait."""
        control = self._file.control
        control.sequence += 1
        try:
            yield control
        finally:
            control.sequence += 1

    def _write_gpu(self, number: int) -> None:
        gpu = self._devices[number] if number < len(self._devices) else None
        instances = [*((gpu and gpu.mig) or ())]
        instances += [None] * (_MAX_MIG - len(instances))
        first = number * (1 + _MAX_MIG)
        for slot, device in enumerate([gpu, *instances], start=first):
            self._file.devices[slot] = _encoded(device) if device else _Device()


# --- the structures of nvml_standin.c; the compiler compares their sizes


class _Answer(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("error", "latency_us", "num_bytes", "unused")),
        ("bytes", ctypes.c_ubyte * _ANSWER_MAX),
    )


class _Device(ctypes.Structure):
    _fields_ = (("present", ctypes.c_uint32), ("mig_enabled", ctypes.c_uint32), ("answers", _Answer * len(_FUNCTIONS)))


class _Control(ctypes.Structure):
    _fields_ = (
        ("sequence", ctypes.c_uint64),
        *((name, ctypes.c_uint32) for name in ("loaded", "generation", "num_gpus", "unused")),
        ("driver_version", ctypes.c_char * 80),
        ("errors", ctypes.c_int32 * len(_FUNCTIONS)),
    )


class _File(ctypes.Structure):
    _fields_ = (
        ("control", _Control),
        ("devices", _Device * _SLOTS),
        ("counts", (ctypes.c_uint64 * len(_FUNCTIONS)) * (_SLOTS + 1)),
    )


def _listed(processes: Sequence[Process]) -> bytes:
    infos = [
        (process.pid, _NOT_AVAILABLE if process.used_bytes is None else process.used_bytes, _NO_INSTANCE, _NO_INSTANCE)
        for process in processes
    ]
    return bytes((pynvml.c_nvmlProcessInfo_v2_t * len(infos))(*infos))


def _sampled(samples: Sequence[tuple[int, int, int]]) -> bytes:
    rows = [(pid, at_us, percent, 0, 0, 0) for pid, at_us, percent in samples]
    return bytes((pynvml.c_nvmlProcessUtilizationSample_t * len(rows))(*rows))


def _told(gpu: Gpu) -> dict[str, tuple[Any, Any]]:
    """Function -> (what is None if the device does not tell it, what is told)."""
    total, free, reserved = gpu.total_bytes or 0, gpu.free_bytes, gpu.reserved_bytes
    v2 = pynvml.c_nvmlMemory_v2_t(pynvml.nvmlMemory_v2, total, reserved, free, total - free - reserved)
    lists = {"Compute": gpu.compute, "Graphics": gpu.graphics}
    numbers = {
        "Temperature": gpu.temperature_celsius,
        "PowerUsage": gpu.power_milliwatts,
        "EnforcedPowerLimit": gpu.power_limit_milliwatts,
        "MigMode": int(gpu.mig is not None),
        "MaxMigDeviceCount": 0 if gpu.mig is None else _MAX_MIG,
    }
    return {
        "MemoryInfo": (gpu.total_bytes, pynvml.c_nvmlMemory_t(total, free, total - free)),
        "MemoryInfo_v2": (gpu.total_bytes, v2),
        "UtilizationRates": (gpu.utilization_percent, pynvml.c_nvmlUtilization_t(gpu.utilization_percent or 0, 0)),
        "ProcessUtilization": (gpu.samples, _sampled(gpu.samples or ())),
        "PciInfo_v3": (gpu.pci_id, pynvml.nvmlPciInfo_t(busId=gpu.pci_id.encode())),
        "UUID": (gpu.uuid, gpu.uuid.encode() + b"\0"),
        "Name": (gpu.name, gpu.name.encode() + b"\0"),
        **{name: (number, ctypes.c_uint32(number or 0)) for name, number in numbers.items()},
        **{f"{kind}RunningProcesses_v{v}": (told, _listed(told or ())) for kind, told in lists.items() for v in (2, 3)},
    }


def _encoded(gpu: Gpu) -> _Device:
    errors, latencies_us, told = _known(gpu.errors), _known(gpu.latencies_us), _told(gpu)
    device = _Device(present=1, mig_enabled=gpu.mig is not None)
    for answer, function in zip(device.answers, _FUNCTIONS, strict=True):
        quantity, raw = told.get(function.removeprefix("nvmlDeviceGet"), (function, b""))
        answer.error = errors.get(function, gpu.error or (_NOT_SUPPORTED if quantity is None else 0))
        answer.latency_us = latencies_us.get(function, gpu.latency_us)
        answer.num_bytes = len(bytes(raw))
        answer.bytes[: answer.num_bytes] = bytes(raw)
    return device


def _known(told: Mapping[str, int]) -> Mapping[str, int]:
    if unknown := set(told) - set(_FUNCTIONS):
        raise ValueError(f"the stand-in has no {', '.join(sorted(unknown))}; it has {', '.join(_FUNCTIONS)}")
    return told


@functools.cache
def _library() -> Path:
    if COMPILER is None:
        raise RuntimeError("the stand-in of the NVIDIA driver library needs a C compiler: cc, gcc, clang, or CC=...")
    folder = Path(tempfile.mkdtemp(prefix="nvml-standin-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    library = folder / "libnvidia-ml.so.1"
    sizes = {"CONTROL_BYTES": _Control, "DEVICE_BYTES": _Device, "FILE_BYTES": _File}
    subprocess.run(
        [COMPILER, "-std=c11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC",
         *(f"-D{name}={ctypes.sizeof(kind)}" for name, kind in sizes.items()), "-o", str(library), str(_SOURCE)],
        check=True,
    )  # fmt: skip
    return library
