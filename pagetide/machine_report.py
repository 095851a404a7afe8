"""What this machine offers an engine, as plain data, and what is wrong with it: the checks of `pagetide doctor`.

Each function returns its section of the report and adds to `problems` what does not work as it should. Changes nothing, but for
a folder that is made and removed at once, where the runtime directory is or would be.
"""

from __future__ import annotations

import grp
import os
import platform
import resource
import stat
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .monitor.runtime_dir import RuntimeDir
from .monitor.sources.process_facts import user_name
from .version import __version__

# The optional dependencies (extras of pyproject.toml) that an engine uses, each with the module that shows it is
# installed.
EXTRAS = {
    "cuda": ("cuda.bindings", "an elastic KV pool on CUDA, and pinned host memory for swaps"),
    "triton": ("triton", "attention on CUDA, and with it CUDA graphs"),
    "flash": ("flash_attn", "attention by flash-attn"),
    "flashinfer": ("flashinfer", "attention by FlashInfer"),
    "constrained": ("llguidance", "output by a JSON schema, a regular expression or a grammar"),
    "server": ("fastapi", "pagetide serve"),
    "shards": ("cloudpickle", "logits processors of a program's own, with a model that is divided over several devices"),
    "ray": ("ray", "pagetide fleet: several engines behind one queue"),
}
_DISTRIBUTIONS = ("torch", "transformers", "numpy", "nvidia-ml-py", "triton", "cuda-bindings", "llguidance")
_ENOUGH_FILES = 256  # open files of an engine with its monitor, its model and some connections
_LITTLE_BYTES = 512 << 20
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_PROC_BIND")
_IN_A_CONTAINER = "in a container, give it the GPUs with the NVIDIA Container Toolkit (--gpus all)"
_NVIDIA, _DISPLAY = "0x10de", "0x03"  # PCI vendor and class
_ANSWER_S = 2.0
_PRODUCT = 2048  # inputs and outputs of the product that is measured


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that does not work as it should, and what to do about it."""

    part: str
    what: str
    fix: str
    fails: bool = True  # False: worth knowing, but everything that is asked for works


def machine() -> dict[str, Any]:
    """Everything but torch and the CUDA devices. `problems` holds a list of `Problem`."""
    from .engine.self_check.cache import cache_dir
    from .engine.self_check.identity import versions

    problems: list[Problem] = []
    return {
        "pagetide": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "versions": versions(_DISTRIBUTIONS),
        "driver": driver(problems),
        "host": memory(problems),
        "limits": limits(problems),
        "threads": threads(problems),
        "extras": {name: {"installed": is_installed(module), "for": what} for name, (module, what) in EXTRAS.items()},
        "models_files": models_files(problems),
        "monitor": monitor_of_here(problems),
        "self_checks": str(cache_dir()),
        "problems": problems,
    }


def is_installed(module: str) -> bool:
    """Whether a module can be found. Imports at most its parent packages."""
    try:
        return find_spec(module) is not None
    except ImportError:
        return False


# ---- the driver ---------------------------------------------------------------------------------


def driver(
    problems: list[Problem],
    *,
    version: Callable[[], str | None] | None = None,
    devices: Path = Path("/dev"),
    bus: Path = Path("/sys/bus/pci/devices"),
    count: Callable[[], int] | None = None,
) -> dict[str, Any]:
    """NVIDIA's driver: its version, its device files, the GPUs that NVML and the bus have.

    `count` asks NVML for the number of GPUs and MIG instances, and raises MonitorError.
    """
    from .engine.self_check.identity import driver_version
    from .monitor.errors import MonitorError

    found = (version or driver_version)()
    files = sorted(path for path in devices.glob("nvidia*") if not path.is_dir())
    refused = [str(path) for path in files if not os.access(path, os.R_OK | os.W_OK)]
    on_bus = sum(_is_nvidia_gpu(path) for path in bus.glob("*"))
    num_seen, error = None, None
    if found is not None or files:
        try:
            num_seen = (count or _count_by_nvml)()
        except MonitorError as failure:
            error = str(failure)
            fix = f"see whether `nvidia-smi` works; {_IN_A_CONTAINER}"
            problems.append(Problem("driver", f"NVML does not work: {error}", fix))
    elif on_bus:
        problems.append(
            Problem(
                "driver",
                f"{on_bus} NVIDIA GPU(s) on the PCI bus, and no driver is loaded",
                f"install NVIDIA's driver; {_IN_A_CONTAINER}",
                fails=False,
            )
        )
    if refused:
        problems.append(
            Problem(
                "driver",
                f"this user may not open {', '.join(refused)}",
                "join the group of these files (ls -l /dev/nvidia*), or have an administrator permit their use",
            )
        )
    return {
        "version": found,
        "device_files": [str(path) for path in files],
        "not_permitted": refused,
        "gpus_on_bus": on_bus,
        "nvml_devices": num_seen,
        "nvml_error": error,
    }


def _count_by_nvml() -> int:
    from .monitor.sources.nvml import NvmlSource

    source = NvmlSource()
    try:
        return len(source.scan())
    finally:
        source.close()


def _is_nvidia_gpu(device: Path) -> bool:
    try:
        vendor, kind = ((device / name).read_text("ascii").strip() for name in ("vendor", "class"))
    except (OSError, ValueError):
        return False
    return vendor == _NVIDIA and kind.startswith(_DISPLAY)


# ---- the host -----------------------------------------------------------------------------------


def memory(problems: list[Problem], proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> dict[str, Any]:
    """Host memory, and the cgroup that limits it, if one does."""
    from .common.host_memory import free_host_bytes, host_memory, limiting_cgroup

    found, free_bytes = host_memory(proc, cgroups), free_host_bytes(proc, cgroups)
    limiting = limiting_cgroup(proc, cgroups)
    if free_bytes < _LITTLE_BYTES:
        fix = "end what is not needed, or raise the cgroup's limit"
        problems.append(Problem("memory", f"{free_bytes >> 20} MiB are free", fix, fails=False))
    return {
        "total_bytes": found.total_bytes,
        "free_bytes": free_bytes,
        "limited_by_cgroup": None if limiting is None else limiting.path,
    }


def limits(
    problems: list[Problem], getrlimit: Callable[[int], tuple[int, int]] = resource.getrlimit
) -> dict[str, dict[str, int | None]]:
    """Limits of this process; None is no limit."""
    found: dict[str, dict[str, int | None]] = {}
    for name, number in (("open_files", resource.RLIMIT_NOFILE), ("locked_bytes", resource.RLIMIT_MEMLOCK)):
        soft, hard = (None if value == resource.RLIM_INFINITY else value for value in getrlimit(number))
        found[name] = {"soft": soft, "hard": hard}
    soft, hard = found["open_files"]["soft"], found["open_files"]["hard"]
    if soft is not None and soft < _ENOUGH_FILES:
        enough = hard is None or hard >= _ENOUGH_FILES
        fix = "ulimit -n 4096" if enough else "raise the hard limit (LimitNOFILE=4096 of the service, or limits.conf)"
        problems.append(Problem("limits", f"{soft} open files are allowed; an engine needs up to {_ENOUGH_FILES}", fix))
    return found


def threads(
    problems: list[Problem],
    *,
    environ: Mapping[str, str] = os.environ,
    cores: int | None = None,
    cpu_max: Path = Path("/sys/fs/cgroup/cpu.max"),
) -> dict[str, Any]:
    """The cores that this process may use, and the variables that set numbers of threads."""
    num_cores = len(os.sched_getaffinity(0)) if cores is None else cores
    quota = _cpu_quota(cpu_max)
    variables = {name: environ[name] for name in _THREAD_VARIABLES if name in environ}
    most = num_cores if quota is None else min(num_cores, max(1, round(quota)))
    named = variables.get("OMP_NUM_THREADS")
    if named is None and most < num_cores:
        problems.append(
            Problem(
                "threads",
                f"the cgroup gives {quota:g} of {num_cores} cores, and torch starts a thread on each",
                f"export OMP_NUM_THREADS={most}",
                fails=False,
            )
        )
    if named is not None:
        first = named.split(",")[0].strip()
        if not first.isdecimal() or not 1 <= int(first) <= most:
            problems.append(
                Problem(
                    "threads",
                    f"OMP_NUM_THREADS={named}, and this process may use {most} cores",
                    f"unset OMP_NUM_THREADS, or set it to at most {most}",
                    fails=False,
                )
            )
    return {"cores": num_cores, "cgroup_cores": quota, "variables": variables}


def _cpu_quota(file: Path) -> float | None:
    """The cores that the cgroup grants; None without a limit."""
    try:
        quota, period = file.read_text("ascii").split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


# ---- models files -------------------------------------------------------------------------------


def models_files(problems: list[Problem]) -> list[dict[str, Any]]:
    """The models files in the order in which they are read, with the names that each defines.

    A name whose model is not on this machine is a note: the others work.
    """
    from .engine.errors import ConfigError, EngineError
    from .engine.loading import models

    found: list[dict[str, Any]] = []
    entries: dict[str, models.ModelEntry] = {}
    for role, file in models.models_files().items():
        names, error = [], None
        try:
            of_file = models.read_models_file(role, file)
            names = sorted(of_file)
            entries |= of_file
        except ConfigError as failure:
            error = str(failure)
            problems.append(Problem("models", error, f"correct {file}: until then no model is found by its name"))
        found.append({"role": role, "file": str(file), "names": names, "error": error})
    for entry in entries.values():
        try:
            entry.resolve()
        except EngineError as failure:
            what, _, fix = str(failure).partition("; ")
            fix = fix or f"correct the entry in {entry.file}, or take it out"
            problems.append(Problem("models", f"not usable: {what}", fix, fails=False))
    return found


# ---- the monitor --------------------------------------------------------------------------------


def monitor_of_here(problems: list[Problem]) -> dict[str, Any]:
    """The monitor of the usual directories; of none where PAGETIDE_RUNTIME_DIR names one that is refused."""
    from .monitor.errors import ConfigInvalid
    from .monitor.runtime_dir import VARIABLE, own_dir, readable_dirs

    try:
        own = own_dir()
    except ConfigInvalid as error:
        what, _, fix = str(error).partition("; ")
        problems.append(Problem("monitor", what, fix))
        return _nothing_runs(os.environ[VARIABLE], [])
    return monitor(problems, readable_dirs(), own)


def _nothing_runs(path: str, directories: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "directories": directories,
        "runtime_dir": path,
        "pid": None,
        "source": None,
        "socket": None,
        "protocol": None,
        "leases": None,
    }


def monitor(problems: list[Problem], directories: Sequence[RuntimeDir], own: RuntimeDir) -> dict[str, Any]:
    """The monitor that an engine would use, the broker beside it, and the rights of the runtime directories."""
    from .monitor.errors import MonitorError
    from .monitor.watching import find_running

    there = [_rights(directory, own, problems) for directory in directories]
    report = _nothing_runs(str(own.path), there)
    try:
        running = find_running(directories, timeout_s=_ANSWER_S)
    except MonitorError as error:
        problems.append(Problem("monitor", str(error), "`vram-monitor serve` starts one again once that has ended"))
        return report
    if running is None:
        return report
    directory, reader = running
    report |= {"runtime_dir": str(directory.path), "pid": reader.monitor_pid, "source": reader.source}
    reader.close()
    return report | _broker(directory, problems)


def _broker(directory: RuntimeDir, problems: list[Problem]) -> dict[str, Any]:
    """Whether the broker answers, the number of its leases, and the version of its protocol."""
    from .allocator.broker_client import BrokerClient
    from .allocator.errors import AllocatorError, ProtocolMismatch
    from .allocator.wire import PROTOCOL

    if not directory.socket.exists():
        return {}  # a monitor that leases nothing, as one that plays a recording
    update = "run monitor and engines with one version of pagetide: restart vram-monitor, or end the engines that use it"
    try:
        leases = BrokerClient(directory.socket, timeout_s=_ANSWER_S).leases()
    except ProtocolMismatch as error:
        problems.append(Problem("monitor", str(error), update))
        return {"socket": str(directory.socket), "protocol": error.theirs}
    except AllocatorError as error:
        problems.append(Problem("monitor", f"its broker does not answer: {error}", update))
        return {"socket": str(directory.socket)}
    return {"socket": str(directory.socket), "protocol": PROTOCOL, "leases": len(leases)}


def _rights(directory: RuntimeDir, own: RuntimeDir, problems: list[Problem]) -> dict[str, Any]:
    """A runtime directory: whether it is there, its owner, group and mode, and whether its monitor can be used."""
    from .monitor.errors import ConfigInvalid, RecordError
    from .monitor.record import RecordReader

    path = directory.path
    elsewhere = "name another directory with PAGETIDE_RUNTIME_DIR"
    try:
        found = path.lstat()
    except FileNotFoundError:
        parent = next(parent for parent in path.parents if parent.exists())
        if directory == own and (why := _why_unusable(parent)) is not None:
            what = f"the runtime directory {path} is not there, and {user_name(os.getuid())} cannot make it in {parent}"
            problems.append(Problem("monitor", f"{what}: {why}", elsewhere))
        return {"path": str(path), "exists": False}
    except OSError as error:
        problems.append(Problem("monitor", f"{path} cannot be examined: {error.strerror}", elsewhere))
        return {"path": str(path), "exists": False}
    owner, group, user = user_name(found.st_uid), _name_of_group(found.st_gid), user_name(os.getuid())
    try:
        if directory == own:
            directory.check()
            if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
                what = f"the runtime directory {path} may not be used by its owner"
                problems.append(Problem("monitor", what, f"chmod u+rwx {path}, or {elsewhere}"))
            elif (why := _why_unusable(path)) is not None:
                problems.append(Problem("monitor", f"nothing can be made in the runtime directory {path}: {why}", elsewhere))
        elif not os.access(path, os.R_OK | os.X_OK):
            fix = f"usermod --append --groups {group} {user}, then log in again; until then {user} shares with no other user"
            problems.append(Problem("monitor", f"{path} belongs to the group {group}, and {user} is not in it", fix))
        if os.access(path, os.X_OK) and os.path.lexists(directory.record):
            RecordReader.open(directory.record).close()
    except (ConfigInvalid, RecordError) as error:
        what, _, fix = str(error).partition("; ")
        problems.append(Problem("monitor", what, fix or elsewhere))
    return {"path": str(path), "exists": True, "owner": owner, "group": group, "mode": stat.filemode(found.st_mode)}


def _why_unusable(folder: Path) -> str | None:
    """Why nothing can be made in a folder; None if it can. Rights do not say it: root has them all, in /proc too."""
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".pagetide-", dir=folder))
    except OSError as error:
        return error.strerror or str(error)
    return None


def _name_of_group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


# ---- torch --------------------------------------------------------------------------------------


def torch_report(problems: list[Problem], has_driver: bool) -> dict[str, Any] | None:
    """Torch's build and threads, and the attention kernels that can be loaded; None if torch cannot be imported."""
    from .engine.self_check.identity import torch_build

    try:
        torch = torch_build()
        from .engine.attention.backends import BACKENDS
        from .engine.attention.choose import MAKERS
    except (ImportError, OSError) as error:
        fix = "install torch, or run make; see the reason with: python -c 'import torch'"
        problems.append(Problem("torch", f"cannot be imported: {type(error).__name__}: {error}", fix))
        return None
    if has_driver and not torch["sees_cuda"]:
        built = torch["cuda"]
        what = f"sees no GPU, though it is built for CUDA {built}" if built else "is a build for CPUs beside a driver"
        fix = "update NVIDIA's driver, or install a torch for the CUDA version that `nvidia-smi` shows"
        problems.append(Problem("torch", what, fix if built else "install torch with CUDA; in a checkout: make TORCH=torch"))
    kernels: dict[str, Any] = {}
    for name, make in MAKERS.items():
        try:
            make()
            kernels[name] = {"loads": True, "error": None}
        except Exception as error:  # a library that breaks as it is loaded may raise anything
            kernels[name] = {"loads": False, "error": f"{type(error).__name__}: {error}"}
            if torch["sees_cuda"] and not isinstance(error, ImportError):
                problems.append(Problem("attention", f"{name} is installed and fails: {error}", BACKENDS[name].install or ""))
    from .engine.layers.quantized_linears import product_ms, product_rates
    from .engine.loading.weight_files import READ_METHODS
    from .engine.memory.decode_rate import record
    from .native import instructions

    quantized: dict[str, Any] = {"formats": list(READ_METHODS), "instructions": instructions(), "size": _PRODUCT}
    quantized["product_ms"] = product_ms(_PRODUCT)
    quantized["bytes_per_s"] = rates = product_rates(_PRODUCT)
    if rates:
        record(rates)
    return torch | {"attention": kernels, "quantized": quantized}
