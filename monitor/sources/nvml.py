"""The NVML source: GPUs and MIG instances from the NVIDIA driver library, through pynvml.

Every call into pynvml goes through `_Library.ask`. Facts that are not obvious:

- used = total - free. NVIDIA's pages disagree on whether `used` of the v2 structure includes the driver's reserve, so
  nothing here reads it. The v1 structure counts the reserve as used; both give the same `total` and `free`.
- A unified-memory chip (GB10) answers NOT_SUPPORTED for memory: its memory is the host's, less a floor for the system.
- HAMi and others intercept the calls about memory in a container and answer with its limit: a `total` that may change at any
  time, and a `free` of limit - use in unsigned arithmetic, which is huge while more is used.
- A GPU partitioned into MIG instances gives its own memory and processes to root alone. Each instance gives memory and
  processes, and nothing else, to its permitted users. The process list of an instance's handle is of that instance: the
  driver filters it (gpuGetProcWithObject in NVIDIA's open-gpu-kernel-modules).
- Until R565 the driver returns pids of the host. Since then it translates them for the caller's pid namespace (the
  container), and omits processes outside of it. So in a container, pids from an old driver must not be looked up, and
  an empty list from a new one does not mean that there are no processes.
- nvmlInit attaches no GPU, nvmlDeviceGetHandleByIndex does: a returned GPU is found by asking for its handle anew. That
  call, and those for uuid and name, may hang for one GPU and not for the others, so each GPU is looked at by a thread of
  its own.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ...common.host_memory import host_memory
from ...common.units import GIB
from ..errors import DeviceUnreadable, SourceUnavailable
from ..snapshot import DetailReading, DeviceInfo, DeviceKind, MemoryReading, ProcessUse
from .process_facts import IdleTimes, ProcessFacts, ProcessTable

T = TypeVar("T")
Handle = Any  # pynvml's c_nvmlDevice_t

SYSTEM_FLOOR_BYTES = 4 * GIB  # of unified memory, for the system and its programs; a quarter of a small one
_TEMPERATURE_GPU = 0  # nvmlTemperatureSensors_t
_TRANSLATES_PIDS_SINCE = 565  # the driver's major version
_INITIAL_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO in the kernel's include/linux/proc_ns.h


class _Code(IntEnum):
    """The values of nvmlReturn_t that matter here."""

    SUCCESS = 0
    UNINITIALIZED = 1
    INVALID_ARGUMENT = 2
    NOT_SUPPORTED = 3
    NO_PERMISSION = 4
    NOT_FOUND = 6
    DRIVER_NOT_LOADED = 9
    LIBRARY_NOT_FOUND = 12
    TIMEOUT = 10
    FUNCTION_NOT_FOUND = 13
    GPU_IS_LOST = 15
    RESET_REQUIRED = 16
    LIB_RM_VERSION_MISMATCH = 18
    ARGUMENT_VERSION_MISMATCH = 25


_LOST = {_Code.GPU_IS_LOST, _Code.RESET_REQUIRED}
_DRIVER_GONE = {_Code.UNINITIALIZED, _Code.DRIVER_NOT_LOADED, _Code.LIB_RM_VERSION_MISMATCH}
_NOBODY_THERE = _LOST | _DRIVER_GONE
_OF_ANOTHER_VERSION = {_Code.INVALID_ARGUMENT, _Code.FUNCTION_NOT_FOUND, _Code.ARGUMENT_VERSION_MISMATCH}


class _NvmlRefusal(Exception):
    """An error from NVML; the message is NVML's own."""

    def __init__(self, code: int, words: str) -> None:
        super().__init__(words)
        self.code = code


_NO_ANSWER_YET = _NvmlRefusal(_Code.TIMEOUT, "it was asked for its name and has not answered yet")


@dataclass(frozen=True, slots=True)
class _Seen:
    """A device as the last scan found it."""

    info: DeviceInfo
    handle: Handle
    failure: _NvmlRefusal | None = None  # why there is no handle: the device was dead
    max_instances: int | None = None  # of a GPU in MIG mode; None: not partitioned

    @property
    def is_split(self) -> bool:
        return self.max_instances is not None


@dataclass(slots=True)
class _Load:
    """What is remembered of the processes of a device."""

    table: ProcessTable = field(default_factory=ProcessTable)
    idle: IdleTimes = field(default_factory=IdleTimes)
    newest_us: int = 0  # the time of the newest sample of load by process


class _Look(threading.Thread):
    """One look at one GPU, which takes as long as the driver does."""

    def __init__(self, look_at: Callable[[int], list[_Seen]], index: int) -> None:
        super().__init__(name=f"look at GPU {index}", daemon=True)  # a hanging thread dies with the process
        self._look_at = look_at
        self.index = index
        self._found: list[_Seen] | Exception = []

    def run(self) -> None:
        try:
            self._found = self._look_at(self.index)
        except Exception as error:  # an internal error: `found` raises it
            self._found = error

    def found(self) -> list[_Seen]:
        """The GPU and its MIG instances, once the thread ended. Raises what the look raised."""
        if isinstance(self._found, Exception):
            raise self._found
        return self._found


class NvmlSource:
    """The NVIDIA devices of this machine; see `Source`.

    Construction loads nothing: the first `scan` loads the driver library. `memory` and `detail` take no lock, so a slow
    device does not delay calls about others. `scan` waits at most `patience_s` for all slow GPUs together, and once for
    each.
    """

    name = "nvml"

    def __init__(self, *, proc: Path = Path("/proc"), patience_s: float = 2.0) -> None:
        self._proc = proc
        self._patience_s = patience_s
        self._lock = threading.Lock()  # one scan or close at a time
        self._library = _Library()
        self._seen: dict[str, _Seen] = {}  # by uuid; replaced as a whole, and read without the lock
        self._loads: dict[str, _Load] = {}  # by uuid; each is used by one thread at a time
        self._looks: dict[int, _Look] = {}  # by index: started, results not yet taken

    def scan(self) -> tuple[DeviceInfo, ...]:
        """The GPUs in NVML's order, each followed by its MIG instances. Raises SourceUnavailable.

        A dead device is listed as last known, or with the uuid "index-N". So is a hanging one; the next scan takes its
        late result. NVML is shut down and reinitialised only if no GPU answers and none hangs: then there is no call to
        disturb, and the driver may have been reset or replaced.
        """
        with self._lock:
            try:
                if self._library.initialized:
                    with suppress(_NvmlRefusal):  # retried below, after a fresh start
                        seen = self._look()
                        if self._hangs() or not all(device.failure for device in seen):
                            return self._keep(seen)
                    self._shutdown()
                if not self._library.initialized:
                    self._library.init()
                return self._keep(self._look())
            except _NvmlRefusal as refusal:
                self._shutdown()
                raise _unavailable(refusal) from refusal

    def memory(self, device: DeviceInfo) -> MemoryReading:
        """Total and free bytes from nvmlDeviceGetMemoryInfo. Raises DeviceUnreadable."""
        seen = self._find(device)
        try:
            memory = self._library.memory(seen.handle)
        except _NvmlRefusal as refusal:
            if refusal.code == _Code.NOT_SUPPORTED and device.kind is DeviceKind.GPU and not seen.is_split:
                return _unified()
            raise _unreadable(refusal, is_split=seen.is_split) from refusal
        return MemoryReading(memory.total, memory.free if memory.free <= memory.total else 0)

    def detail(self, device: DeviceInfo) -> DetailReading:
        """Utilisation, temperature, power and processes; None for what NVML refuses of a present device.

        Raises DeviceUnreadable.
        """
        handle, ask = self._find(device).handle, self._library.ask
        try:
            rates = _given(ask, "nvmlDeviceGetUtilizationRates", handle)
            celsius = _given(ask, "nvmlDeviceGetTemperature", handle, _TEMPERATURE_GPU)
            milliwatts = _given(ask, "nvmlDeviceGetPowerUsage", handle)
            limit_milliwatts = _given(ask, "nvmlDeviceGetEnforcedPowerLimit", handle)
            processes = self._processes(device.uuid, handle)
        except _NvmlRefusal as refusal:
            raise _unreadable(refusal) from refusal
        return DetailReading(
            utilization=None if rates is None else rates.gpu / 100,
            temperature_celsius=None if celsius is None else float(celsius),
            power_watts=None if milliwatts is None else milliwatts / 1000,
            power_limit_watts=None if limit_milliwatts is None else limit_milliwatts / 1000,
            processes=processes,
        )

    def close(self) -> None:
        """Shut NVML down, unless a call into it hangs. Idempotent; a later `scan` opens it again."""
        with self._lock:
            self._seen = {}
            self._shutdown()

    # --- scanning

    def _keep(self, devices: list[_Seen]) -> tuple[DeviceInfo, ...]:
        self._seen = {device.info.uuid: device for device in devices}
        return tuple(device.info for device in devices)

    def _hangs(self) -> bool:
        return any(look.is_alive() for look in self._looks.values())

    def _shutdown(self) -> None:
        """Shut NVML down, if no look hangs in it."""
        if not self._hangs():
            self._looks = {}  # their results are useless to the next driver
            self._library.shutdown()

    def _look(self) -> list[_Seen]:
        """Every device, dead or not. Raises _NvmlRefusal if NVML as a whole does not answer."""
        count = self._library.ask("nvmlDeviceGetCount")
        self._await_looks(count)
        hanging = {index: look for index, look in self._looks.items() if look.is_alive()}
        ended = {index: look for index, look in self._looks.items() if index not in hanging}
        self._looks = hanging
        looked = {index: look.found() for index, look in ended.items() if index < count}
        answered = {seen[0].info.uuid for seen in looked.values() if seen[0].failure is None}
        found: list[_Seen] = []
        for index in range(count):
            gpu, *instances = looked[index] if index in looked else self._hanging(index)
            if index in looked and gpu.failure is None:
                found += [gpu, *instances]
            elif gpu.info.uuid in answered:  # indices have moved: this index's former device answers at another one
                found.append(_Seen(_nameless(gpu.info.index), None, gpu.failure or _NO_ANSWER_YET))
            else:
                found += [gpu, *instances]
        return found

    def _await_looks(self, count: int) -> None:
        """Start a look at every GPU without a hanging one, and wait until the new looks end or time out."""
        begun = [_Look(self._look_at_gpu, index) for index in range(count) if index not in self._looks]
        self._looks |= {look.index: look for look in begun}
        deadline = time.monotonic() + self._patience_s
        for look in begun:
            look.start()
        for look in begun:
            look.join(max(0.0, deadline - time.monotonic()))

    def _hanging(self, index: int) -> list[_Seen]:
        """A GPU that does not answer now, and its instances: as last known, with their handles.

        Calls by these handles may still work. A GPU that was never known is a failure until it answers.
        """
        for seen in self._seen.values():
            if seen.info.index == str(index):
                return [seen, *self._instances_known(seen.info.uuid)]
        return [_Seen(_nameless(str(index)), None, _NO_ANSWER_YET)]

    def _instances_known(self, uuid: str) -> list[_Seen]:
        return [seen for seen in self._seen.values() if seen.info.parent_uuid == uuid]

    def _look_at_gpu(self, index: int) -> list[_Seen]:
        gpu = self._look_at(str(index), ("nvmlDeviceGetHandleByIndex", index))
        if gpu.failure is None:
            return [gpu, *self._look_at_instances(gpu)]
        return [gpu, *(replace(seen, failure=gpu.failure) for seen in self._instances_known(gpu.info.uuid))]

    def _look_at_instances(self, gpu: _Seen) -> list[_Seen]:
        found = []
        for number in range(gpu.max_instances or 0):
            for_handle = ("nvmlDeviceGetMigDeviceHandleByIndex", gpu.handle, number)
            instance = self._look_at(f"{gpu.info.index}:{number}", for_handle, gpu.info)
            if instance.failure is None or instance.failure.code != _Code.NOT_FOUND:
                found.append(instance)
        return found

    def _look_at(self, index: str, for_handle: tuple[Any, ...], parent: DeviceInfo | None = None) -> _Seen:
        """The device behind the handle that `for_handle`, a call with its arguments, returns."""
        ask = self._library.ask
        uuid = None
        try:
            handle = ask(*for_handle)
            uuid = ask("nvmlDeviceGetUUID", handle)
            name = _given(ask, "nvmlDeviceGetName", handle)
            if parent is not None:
                return _Seen(DeviceInfo(uuid, index, DeviceKind.MIG, name, parent.pci_id, parent.uuid), handle)
            pci = _given(ask, "nvmlDeviceGetPciInfo_v3", handle)
            info = DeviceInfo(uuid, index, DeviceKind.GPU, name, pci and pci.busId)
            in_mig_mode, _pending = _given(ask, "nvmlDeviceGetMigMode", handle) or (False, False)
            max_instances = (_given(ask, "nvmlDeviceGetMaxMigDeviceCount", handle) or 0) if in_mig_mode else None
            return _Seen(info, handle, max_instances=max_instances)
        except _NvmlRefusal as refusal:
            return _Seen(self._remembered(uuid, index, parent), None, refusal)

    def _remembered(self, uuid: str | None, index: str, parent: DeviceInfo | None) -> DeviceInfo:
        """The last known info of a dead device."""
        for seen in self._seen.values():
            if seen.info.uuid == uuid or (uuid is None and seen.info.index == index):
                return replace(seen.info, index=index)
        return _nameless(index, uuid, parent)

    # --- reading

    def _find(self, device: DeviceInfo) -> _Seen:
        """The device with its handle. Raises DeviceUnreadable."""
        seen = self._seen.get(device.uuid)
        if seen is None:
            raise DeviceUnreadable(f"NVML showed no device {device.uuid} when it was last asked for its devices")
        if seen.failure is not None:
            raise _unreadable(seen.failure) from seen.failure
        return seen

    def _processes(self, uuid: str, handle: Handle) -> tuple[ProcessUse, ...] | None:
        """Compute and graphics processes merged by pid; None if none is reported and some may be hidden."""
        compute = _given(self._library.compute_processes, handle)
        graphics = _given(self._library.graphics_processes, handle)
        contained, translated = self._in_container(), self._library.translates_pids
        some_hidden = graphics is None or (contained and translated)
        if compute is None or (some_hidden and not compute and not graphics):
            return None
        kinds: dict[int, str] = {}
        used_bytes: dict[int, int | None] = {}
        for kind, processes in (("compute", compute), ("graphics", graphics or ())):
            for process in processes:
                kinds[process.pid] = "compute+graphics" if kinds.get(process.pid, kind) != kind else kind
                # Each list gives a process's whole use of the device: nothing to add up.
                if used_bytes.get(process.pid) is None:
                    used_bytes[process.pid] = process.usedGpuMemory
        ours = translated or not contained  # else a pid means nothing here, or another process
        load = self._loads.setdefault(uuid, _Load())
        idle = self._idle_seconds(load, handle, kinds)
        facts = load.table.facts(kinds) if ours else {}
        return tuple(
            ProcessUse(
                pid, used_bytes[pid], kinds[pid], of.user, of.command, cgroup=of.cgroup, idle_seconds=idle.get(pid),
            )
            for pid in kinds
            for of in (facts.get(pid) or ProcessFacts(pid),)
        )  # fmt: skip

    def _idle_seconds(self, load: _Load, handle: Handle, pids: Iterable[int]) -> Mapping[Hashable, float]:
        """How long each process has not computed, by the driver's samples; {} where it has none: MIG, some consumer cards."""
        try:
            samples = self._library.ask("nvmlDeviceGetProcessUtilization", handle, load.newest_us)
        except _NvmlRefusal as refusal:
            if refusal.code not in (_Code.SUCCESS, _Code.NOT_FOUND):  # pynvml raises SUCCESS for an empty list
                return {}
            samples = []
        busy = {one.pid for one in samples if one.smUtil or one.encUtil or one.decUtil}
        load.newest_us = max([load.newest_us, *(one.timeStamp for one in samples)])
        return load.idle.update({pid: pid in busy for pid in pids}, time.monotonic_ns())

    def _in_container(self) -> bool:
        try:
            return os.readlink(self._proc / "self" / "ns" / "pid") != _INITIAL_PID_NAMESPACE
        except OSError:  # unknown: assume a container, which claims less
            return True


class _Library:
    """The access to NVML. Its calls raise _NvmlRefusal."""

    def __init__(self) -> None:
        self.initialized = False
        self.translates_pids = False
        self._nvml: Any = None  # the module pynvml, set by the first `init`

    def init(self) -> None:
        """Load the driver library if needed, and initialise it."""
        import pynvml

        self._nvml = pynvml
        self.ask("nvmlInit")
        self.initialized = True
        version = re.match(r"\d+", _given(self.ask, "nvmlSystemGetDriverVersion") or "")
        self.translates_pids = version is not None and int(version[0]) >= _TRANSLATES_PIDS_SINCE
        self.memory = _Versioned(
            lambda device: self.ask("nvmlDeviceGetMemoryInfo", device, pynvml.nvmlMemory_v2),
            partial(self.ask, "nvmlDeviceGetMemoryInfo"),
        )
        self.compute_processes = _Versioned(
            partial(self.ask, "nvmlDeviceGetComputeRunningProcesses_v3"),
            partial(self.ask, "nvmlDeviceGetComputeRunningProcesses_v2"),
        )
        self.graphics_processes = _Versioned(
            partial(self.ask, "nvmlDeviceGetGraphicsRunningProcesses_v3"),
            partial(self.ask, "nvmlDeviceGetGraphicsRunningProcesses_v2"),
        )

    def shutdown(self) -> None:
        """Shut NVML down, if it is initialised."""
        if self.initialized:
            self.initialized = False
            with suppress(_NvmlRefusal):  # the driver has gone, and its resources with it
                self.ask("nvmlShutdown")

    def ask(self, function: str, *arguments: Any) -> Any:
        """The result of pynvml's `function`."""
        try:
            return getattr(self._nvml, function)(*arguments)
        except self._nvml.NVMLError as error:
            raise _NvmlRefusal(error.value, str(error)) from error


class _Versioned:
    """A call that old drivers have in an older version: tries the newer one first, then keeps the one that works."""

    def __init__(self, newer: Callable[[Handle], Any], older: Callable[[Handle], Any]) -> None:
        self._call = newer
        self._older = older

    def __call__(self, device: Handle) -> Any:
        try:
            return self._call(device)
        except _NvmlRefusal as refusal:
            if refusal.code not in _OF_ANOTHER_VERSION or self._call is self._older:
                raise
        answer = self._older(device)  # a really invalid argument is refused here as well
        self._call = self._older
        return answer


def _given(ask: Callable[..., Any], *arguments: Any) -> Any:
    """The result of `ask`; None if it is refused for a present device."""
    try:
        return ask(*arguments)
    except _NvmlRefusal as refusal:
        if refusal.code in _NOBODY_THERE:
            raise
        return None


def _unified() -> MemoryReading:
    """The memory of a chip that shares it with the system. The floor counts neither as its total nor as free."""
    total_bytes, free_bytes = host_memory()
    floor_bytes = min(SYSTEM_FLOOR_BYTES, total_bytes // 4)
    return MemoryReading(total_bytes - floor_bytes, max(0, free_bytes - floor_bytes))


def _nameless(index: str, uuid: str | None = None, parent: DeviceInfo | None = None) -> DeviceInfo:
    """The info of a device that was dead in every scan."""
    kind = DeviceKind.MIG if parent else DeviceKind.GPU
    return DeviceInfo(uuid or f"index-{index}", index, kind, parent_uuid=parent.uuid if parent else None)


def _unavailable(refusal: _NvmlRefusal) -> SourceUnavailable:
    reasons: dict[int, str] = {
        _Code.LIBRARY_NOT_FOUND: (
            "the library of the NVIDIA driver, libnvidia-ml.so.1, was not found; install the driver, or watch host memory "
            "with --source host"
        ),
        _Code.DRIVER_NOT_LOADED: "the NVIDIA driver is not loaded",
        _Code.LIB_RM_VERSION_MISMATCH: (
            "the library of the NVIDIA driver is of another version than the driver that runs, as after an upgrade; "
            "restart this process, and the machine if that does not help"
        ),
    }
    reason = reasons.get(refusal.code, "NVML, the library of the NVIDIA driver, does not work")
    return SourceUnavailable(f"{reason} (NVML: {refusal})")


def _unreadable(refusal: _NvmlRefusal, *, is_split: bool = False) -> DeviceUnreadable:
    if refusal.code in _DRIVER_GONE:
        reason = "the NVIDIA driver has gone away"
    elif refusal.code in _LOST:
        reason = "the device is lost until it is reset"
    elif refusal.code == _Code.NO_PERMISSION and is_split:
        reason = "this GPU is split into MIG instances, and only root may read it as a whole"
    elif refusal.code == _Code.NO_PERMISSION:
        reason = "this user may not read the device"
    else:
        reason = "the device gave no answer"
    return DeviceUnreadable(f"{reason} (NVML: {refusal})", lost=refusal.code in _LOST)
