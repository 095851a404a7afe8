"""Selection of the attention kernel: the requested one, or the fastest usable one as measured at start.

    "auto"       CPU: native, if it is built and agrees with torch, else torch
                 CUDA: the fastest kernel that supports the model, is installed and agrees with torch
    requested    it supports the model, is installed and agrees with torch; otherwise the engine fails to start and says why

A failing library is dropped with a warning, but its damage to the device cannot be undone here: an illegal access ends the CUDA
context. Backends that failed in the device's self-check are therefore not tried (`engine/self_check`). Reasons:
docs/decisions/0025-attention-backends.md.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...cache.geometry import Geometry
from ..errors import ConfigError
from . import trial
from .backends import AUTO, BACKENDS, AttentionSpec, unmet
from .context import AttentionCall, AttentionKernel
from .torch_kernel import TorchKernel

log = logging.getLogger(__name__)

Make = Callable[[], AttentionKernel]  # raises ImportError if the library is missing
Measure = Callable[[Callable[[], object]], float]  # seconds per call
NO_FAULTS: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class Site:
    """The device, dtypes and block size for a kernel."""

    device: torch.device
    dtype: torch.dtype  # the model's
    block_size: int
    capability: tuple[int, int] | None  # of a CUDA device
    kv_dtype: torch.dtype | None = None  # of K and V with scales; None: they have the model's

    @classmethod
    def of(cls, device: torch.device, dtype: torch.dtype, geometry: Geometry) -> Site:
        """The site of an engine on `device`, with a model in `dtype`."""
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        kv_dtype = getattr(torch, geometry.dtype) if geometry.has_scales else None
        return cls(device, dtype, geometry.block_size, capability, kv_dtype)

    def obstacle(self, name: str, specs: Iterable[AttentionSpec]) -> str | None:
        """Why backend `name` cannot serve layers with these specs here, as a clause; None if it can."""
        capability = self.capability
        if name == "triton" and self.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
            capability = (9, 0)  # the interpreter supports everything
        dtype, kv_dtype = (str(one).removeprefix("torch.") for one in (self.dtype, self.kv_dtype or self.dtype))
        return unmet(
            name,
            device=str(self.device),
            capability=capability,
            dtype=dtype,
            kv_dtype=kv_dtype,
            block_size=self.block_size,
            specs=specs,
        )


class WatchedKernel(TorchKernel):
    """A torch kernel that records the layers' attention specs, for the probe."""

    def __init__(self) -> None:
        super().__init__()
        self.specs: Counter[AttentionSpec] = Counter()

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """See `AttentionKernel.attend`."""
        self.specs[call.spec] += 1
        return super().attend(call)


def check(name: str, site: Site, geometry: Geometry, faults: Mapping[str, str] = NO_FAULTS) -> None:
    """Raises ConfigError if backend `name` does not support the layers' shapes, is not installed, or is in `faults`.

    It runs before weights are read. `faults` maps backends that the device's self-check switched off to reasons.
    """
    if name == AUTO:
        return
    if name in faults:
        raise ConfigError(
            f"attention={name!r} failed in the self-check of {site.device}: {faults[name]}; use attention='auto', or repeat "
            "the check when the reason is gone: pagetide doctor --refresh"
        )
    shapes = {AttentionSpec(layer.num_kv_heads, layer.num_kv_heads, layer.k_dim, layer.v_dim) for layer in geometry.layers}
    _refuse(name, site, [shape for shape in shapes if shape.num_kv_heads])
    _made(name, MAKERS)


def choose(
    name: str,
    site: Site,
    specs: Counter[AttentionSpec],
    *,
    faults: Mapping[str, str] = NO_FAULTS,
    makers: Mapping[str, Make] | None = None,
    measure: Measure = trial.cuda_seconds,
) -> AttentionKernel:
    """The kernel for an engine with the `specs` of its layers and their counts.

    Args:
        faults: Backends that "auto" excludes, with reasons.

    Raises:
        ConfigError: the requested backend cannot serve; the message names alternatives.
    """
    makers = MAKERS if makers is None else makers
    with torch.inference_mode():
        if name == AUTO:
            sound = {
                backend: make
                for backend, make in makers.items()
                if backend not in faults and (site.capability is not None or backend == "native")
            }
            kernel = _fastest(site, specs, sound, measure)
        else:
            kernel = _asked_for(name, site, specs, makers)
    if site.device.type == "cuda":
        torch.cuda.empty_cache()  # the pool allocates from the driver, not from torch
    return kernel


class KernelAbsent(Exception):
    """A backend that does not support the model here, or is not installed."""


def usable_kernel(name: str, site: Site, specs: Collection[AttentionSpec], makers: Mapping[str, Make]) -> AttentionKernel:
    """The kernel of backend `name` for layers with these specs. Raises KernelAbsent, and what a broken installation raises."""
    if (obstacle := site.obstacle(name, specs)) is not None:
        raise KernelAbsent(obstacle)
    try:
        return makers[name]()
    except ImportError as error:
        raise KernelAbsent(str(error)) from error


def fault(kernel: AttentionKernel, site: Site, specs: Collection[AttentionSpec]) -> str | None:
    """How the kernel's results differ from torch's, as a clause; None if they agree. Raises what the kernel raises."""
    return trial.fault(kernel, list(specs), site.block_size, site.dtype, site.device, site.kv_dtype)


def _asked_for(name: str, site: Site, specs: Counter[AttentionSpec], makers: Mapping[str, Make]) -> AttentionKernel:
    _refuse(name, site, specs)
    kernel = _made(name, makers)
    if name == "torch" or (name == "triton" and site.capability is None):  # interpreted, which takes long
        return kernel
    try:
        why = fault(kernel, site, specs)
    except Exception as error:  # a library may raise anything
        raise ConfigError(f"attention={name!r} fails here ({type(error).__name__}: {error}); use attention='auto'") from error
    if why is not None:
        raise ConfigError(f"attention={name!r} cannot be trusted here: {why}; use attention='auto'")
    kernel.release_buffers()
    return kernel


def _fastest(site: Site, specs: Counter[AttentionSpec], makers: Mapping[str, Make], measure: Measure) -> AttentionKernel:
    kernels = [TorchKernel(), *_that_agree(site, specs, makers)]
    if site.capability is None or len(kernels) == 1 or not specs:
        return kernels[-1]
    usual = specs.most_common(1)[0][0]
    try:
        results = trial.seconds(kernels, usual, site.block_size, site.dtype, site.device, measure, site.kv_dtype)
    except Exception as error:  # for example, no room for the pool to measure over
        log.warning("attention by %s, unmeasured: %s: %s", kernels[1].name, type(error).__name__, error)
        return kernels[1]
    taken: dict[AttentionKernel, float] = {}
    for kernel, result in zip(kernels, results, strict=True):
        if isinstance(result, Exception):
            _leave_out(kernel.name, result)
        else:
            taken[kernel] = result
    if not taken:
        return kernels[0]
    first, *others = sorted(taken, key=lambda kernel: taken[kernel])
    context = trial.longest_context(usual, site.block_size, site.kv_dtype or site.dtype)
    log.info(
        "attention by %s: %.3g ms a layer%s (%d decodes of %d tokens and a chunk of %d)",
        first.name,
        taken[first] * 1000,
        "".join(f"; {other.name} {taken[other] * 1000:.3g}" for other in others),
        trial.DECODES,
        context,
        min(trial.CHUNK, context),
    )
    return first


def _that_agree(site: Site, specs: Counter[AttentionSpec], makers: Mapping[str, Make]) -> list[AttentionKernel]:
    """The usable kernels besides torch's: they support the specs, are installed, and give torch's results."""
    found = []
    for name, needs in BACKENDS.items():
        if name == "torch" or needs.compiles or name not in makers:
            continue
        try:
            kernel = usable_kernel(name, site, specs, makers)
            if (why := fault(kernel, site, specs)) is None:
                found.append(kernel)
            else:
                log.warning("attention by %s is left out: %s", name, why)
        except KernelAbsent as error:
            log.debug("attention: %s is no candidate: %s", name, error)
        except Exception as error:  # a broken installation; a library may raise anything
            _leave_out(name, error)
    return found


def _leave_out(name: str, error: Exception) -> None:
    log.warning("attention by %s is left out, as it fails: %s: %s", name, type(error).__name__, error)


def _refuse(name: str, site: Site, specs: Iterable[AttentionSpec]) -> None:
    specs = list(specs)
    obstacle = site.obstacle(name, specs)
    if obstacle is not None:
        works = [repr(other) for other in ("triton", "torch") if other != name and site.obstacle(other, specs) is None]
        raise ConfigError(f"attention={name!r} cannot serve this model: {obstacle}; use 'auto', or {' or '.join(works)}")


def _made(name: str, makers: Mapping[str, Make]) -> AttentionKernel:
    try:
        return makers[name]()
    except ImportError as error:
        raise ConfigError(
            f"attention={name!r} is not there ({error}): {BACKENDS[name].install}; or use attention='auto'"
        ) from error


def _triton() -> AttentionKernel:
    from .triton_kernel import TritonKernel

    return TritonKernel()


def _native() -> AttentionKernel:
    from .native_kernel import NativeKernel

    return NativeKernel()


def _library(module: str, kernel: str) -> Make:
    def make() -> AttentionKernel:
        from importlib import import_module

        of: Any = getattr(import_module(f".{module}", __package__), kernel)
        made: AttentionKernel = of(of.load())
        return made

    return make


MAKERS: dict[str, Make] = {
    "torch": TorchKernel,
    "native": _native,
    "triton": _triton,
    "flash-attn": _library("flash_attn_kernel", "FlashKernel"),
    "flash-attn-3": _library("flash_attn_kernel", "Flash3Kernel"),
    "flash-attn-4": _library("flash_attn_kernel", "Flash4Kernel"),
    "flashinfer": _library("flashinfer_kernel", "FlashInferKernel"),
    "varlen": _library("flash_attn_kernel", "VarlenKernel"),
}
