"""Sample snapshots for the tests of the monitor: the same every time, of any number of devices and in any trouble."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pagetide.common.units import GIB, MIB
from pagetide.monitor.snapshot import (
    DetailReading,
    Device,
    DeviceDetail,
    DeviceInfo,
    DeviceKind,
    DeviceMemory,
    LeaseUse,
    ProcessUse,
    ReservationUse,
    Snapshot,
)

SECOND_NS = 1_000_000_000
AT_NS = 50_000 * SECOND_NS  # when every sample was taken
H200_BYTES = 150_754_820_096
HOST_BYTES = 1_081_101_176_832
HISTORY = 256

_TRAINING = "python train.py --config finetune.yaml --bf16 --resume"
# (pid, GiB, kind, user, command, engine)
_TENANTS = (
    (40961, 62.4, "compute", "ada", "python serve.py --model llama-3.1-8b", "llama-8b"),
    (41877, 21.0, "compute", "grace", _TRAINING, None),
    (52340, 0.6, "graphics", "root", "/usr/lib/xorg/Xorg -core :0 -seat seat0 -auth /run/lightdm/:0", None),
)
_LIGHTER = (
    (40988, 104.5, "compute", "ada", "python serve.py --model qwen3-32b", "qwen3-32b"),
    (53011, 7.3, "compute", "linus", "jupyter-kernel --f=/run/user/1003/kernel-7f3a.json", None),
)


def sample_device(number: int = 0, *, num_processes: int | None = None, bytes_per_second: float | None = None) -> Device:
    """The GPU that NVML calls `number`: even ones grow towards their end, odd ones are nearly full and steady."""
    tenants = _LIGHTER if number % 2 else _TENANTS
    processes = tuple(
        ProcessUse(pid + 10_000 * (number // 2), int(gib * GIB), kind, user, command, engine)
        for pid, gib, kind, user, command, engine in tenants
    )
    if num_processes is not None:
        processes = tuple(
            ProcessUse(60_000 + number * 1000 + rank, (num_processes - rank) * MIB, command=f"worker --rank {rank}")
            for rank in range(num_processes)
        )
    used = sum(process.used_bytes or 0 for process in processes) + 551 * MIB
    used = min(used + (number * 977 % 5) * 3 * GIB, H200_BYTES)
    growth = (0.0 if number % 2 else 212.5 * MIB) if bytes_per_second is None else bytes_per_second
    uuid, pci_id = f"GPU-{number:08x}-0000-4000-8000-000000000000", f"00000000:{0x1B + 0x20 * number:02X}:00.0"
    return Device(
        DeviceInfo(uuid, str(number), DeviceKind.GPU, "NVIDIA H200", pci_id),
        DeviceMemory(
            at_ns=AT_NS - 12_000_000, interval_ns=20_000_000, total_bytes=H200_BYTES, free_bytes=H200_BYTES - used,
            bytes_per_second=growth, polls=120_000 + number, failures=0,
        ),
        DeviceDetail(
            at_ns=AT_NS - 400_000_000, interval_ns=SECOND_NS, history=sample_history(used, number),
            reading=DetailReading(
                utilization=(0.62, 0.98, 0.35, 0.81)[number % 4],
                temperature_celsius=(61.0, 74.0, 48.0, 66.0)[number % 4],
                power_watts=(412.4, 688.1, 240.7, 533.0)[number % 4],
                power_limit_watts=700.0,
                processes=processes,
            ),
        ),
    )  # fmt: skip


def sample_history(used_bytes: int, seed: int) -> tuple[int, ...]:
    """Used bytes over the last `HISTORY` seconds, up to `used_bytes`: a climb in steps, or a plateau with a dip.

    In whole numbers, so that charts of it are the same on every machine.
    """
    values = []
    for second in range(1, HISTORY + 1):
        if seed % 2:
            percent = 100 - max(0, 45 - abs(second - HISTORY * 2 // 5))
        else:
            percent = 30 + 70 * second // HISTORY - (second * 7 // (9 + seed) % 5 if second < HISTORY else 0)
        values.append(used_bytes * percent // 100)
    return tuple(values)


def host_device() -> Device:
    gpu, used = sample_device(0), 187 * GIB
    process = ProcessUse(41877, 38 * GIB, "host", "grace", _TRAINING)
    return Device(
        DeviceInfo("HOST-4c4c4544", "host", DeviceKind.HOST, "Host memory"),
        replace(gpu.memory, total_bytes=HOST_BYTES, free_bytes=HOST_BYTES - used, bytes_per_second=-1.4 * MIB),
        replace(gpu.detail, reading=DetailReading(utilization=0.17, processes=(process,)), history=sample_history(used, 6)),
    )


def mig_devices(number: int) -> tuple[Device, ...]:
    """A partitioned GPU, whose own memory the driver does not tell, and two instances of it."""
    gpu = sample_device(number)
    memory = replace(gpu.memory, total_bytes=None, free_bytes=None, bytes_per_second=None)
    reading = DetailReading(temperature_celsius=44.0, power_watts=210.0)
    devices = [replace(gpu, memory=memory, detail=replace(gpu.detail, reading=reading, history=()))]
    total = int(69.5 * GIB)
    for instance, (profile, used_gib) in enumerate((("MIG 4g.71gb", 48.2), ("MIG 3g.71gb", 3.1))):
        used, uuid, index = int(used_gib * GIB), f"MIG-{number:08x}-{instance}", f"{number}:{instance}"
        process = ProcessUse(70_001 + instance, used - 98 * MIB, "compute", "ada", f"python infer.py {instance}")
        reading = DetailReading(processes=(process,))
        devices.append(
            Device(
                DeviceInfo(uuid, index, DeviceKind.MIG, profile, parent_uuid=gpu.info.uuid),
                replace(gpu.memory, total_bytes=total, free_bytes=total - used, bytes_per_second=0.0),
                replace(gpu.detail, reading=reading, history=sample_history(used, instance)),
            )
        )
    return tuple(devices)


def dead(device: Device) -> Device:
    error = "GPU is lost"
    memory = replace(device.memory, total_bytes=None, free_bytes=None, bytes_per_second=None, failures=7, error=error)
    detail = replace(device.detail, reading=DetailReading(), error=error)
    return replace(device, memory=memory, detail=detail)


def stale(device: Device) -> Device:
    return replace(device, memory=replace(device.memory, at_ns=AT_NS - 12 * SECOND_NS))


def unanswered(device: Device) -> Device:
    memory = DeviceMemory(0, device.memory.interval_ns, None, None, None, polls=0, failures=0)
    return replace(device, memory=memory, detail=DeviceDetail(0, SECOND_NS, DetailReading()))


def snapshot_of(*devices: Device) -> Snapshot:
    return Snapshot(AT_NS, "nvml+host", monitor_pid=4242, started_ns=AT_NS - 11_520 * SECOND_NS, devices=devices)


def sample_snapshot(num_gpus: int = 2, *, num_processes: int | None = None, host: bool = True) -> Snapshot:
    """`num_gpus` GPUs, each with its usual tenants or with `num_processes` small ones, and the host."""
    gpus = [sample_device(number, num_processes=num_processes) for number in range(num_gpus)]
    return snapshot_of(*gpus, *([host_device()] if host else []))


def sample_leases(num_gpus: int = 2) -> tuple[LeaseUse, ...]:
    """Two on each GPU: on even ones those of an engine that is recalled and of one that grows, on odd ones worse."""
    leases: list[LeaseUse] = []
    for number in range(num_gpus):
        uuid, pids = sample_device(number).info.uuid, 10_000 * (number // 2)
        if number % 2:
            leases += (
                sample_lease(
                    "qwen3-32b", 40988 + pids, uuid, 104.5, held=104.5, weights=62, kv=39.5, minimum=70,
                    state="overdue", recall_target_bytes=88 * GIB, recall_age_seconds=12.6,
                ),
                sample_lease("judge-1b", 39007 + pids, uuid, 0.7, held=0.6, user="grace", state="reaping"),
            )  # fmt: skip
        else:
            leases += (
                sample_lease(
                    "embed-small", 43210 + pids, uuid, 24, held=18, weights=1.2, kv=16, free=11.5, minimum=4, limit=32,
                    kept_bytes=8 * GIB,
                    state="recalling", recall_target_bytes=int(8.5 * GIB), recall_age_seconds=0.34,
                ),
                sample_lease(
                    "llama-8b", 40961 + pids, uuid, 78, held=62.4, weights=15, kv=44.9, free=0.4, minimum=20,
                    asked_bytes=96 * GIB,
                ),
            )  # fmt: skip
    return tuple(leases)


def sample_lease(
    engine: str, pid: int, device_uuid: str, granted: float, *, held: float, free: float = 0, minimum: float = 0,
    limit: float | None = None, weights: float | None = None, kv: float | None = None, **changes: Any,
) -> LeaseUse:  # fmt: skip
    """A lease; amounts in GiB. What is neither weights nor KV is reported as other; without both nothing is reported."""
    reported: dict[str, int] = {}
    if weights is not None and kv is not None:
        reported = {"weights": int(weights * GIB), "kv": int(kv * GIB)}
        reported["other"] = int(held * GIB) - sum(reported.values())
    lease = LeaseUse(
        engine=engine, pid=pid, user="ada", device_uuid=device_uuid, min_bytes=int(minimum * GIB),
        max_bytes=None if limit is None else int(limit * GIB), weight=1.0, priority=0,
        granted_bytes=int(granted * GIB), held_bytes=int(held * GIB), held_by_class=reported,
        spare_bytes=int(free * GIB), asked_bytes=None, state="ok", recall_target_bytes=None, recall_age_seconds=None,
    )  # fmt: skip
    return replace(lease, **changes)


def sample_reservations(number: int) -> list[ReservationUse]:
    """Reservations on the first device: every other one waits for more."""
    uuid = sample_device(0).info.uuid
    held = ReservationUse(1, "comfy", 501, "ada", uuid, "held", 8 * GIB, 8 * GIB, 0, None, None, 7500.0)
    waits = ReservationUse(2, "train.py", 502, "grace", uuid, "waiting", 2 * GIB, 6 * GIB, 5, 2, 40.5, None)
    return [replace((held, waits)[i % 2], id=i + 1) for i in range(number)]


def leased_snapshot(num_gpus: int = 2) -> Snapshot:
    return sample_snapshot(num_gpus).with_leases(sample_leases(num_gpus))
