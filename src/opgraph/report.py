"""The facts that `python -m opgraph info` prints. Nothing is imported to learn its version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["collect", "text"]

# Distribution names of what opgraph works with; CuPy and the CUDA packages carry the toolkit's version in theirs.
_PACKAGES = (
    "numpy",
    "ml_dtypes",
    "torch",
    "jax",
    "jaxlib",
    "cupy",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "apache-tvm-ffi",
    "triton",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
    "nvidia-cudnn-frontend",
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-nvrtc-cu12",
)


def collect() -> dict[str, Any]:
    """The report as plain values, by section."""
    import opgraph
    from opgraph.engines.fused.cache import cache_folder

    return {
        "versions": {
            "opgraph": opgraph.__version__,
            "cuDNN API served (a compatibility level, no installed library)": opgraph.backend_version_string(),
            **_python(),
            **_packages(),
        },
        "machine": _machine(),
        "devices": _devices(),
        "engines": _engines(),
        "folders": {"kernel cache": str(cache_folder())},
        "environment": _environment(),
    }


def text(found: Mapping[str, Any]) -> str:
    """The report for people."""
    lines = []
    for section, content in found.items():
        lines.append(f"{section}:")
        if isinstance(content, Mapping):
            lines += [f"  {key}: {value}" for key, value in content.items()] or ["  none"]
        else:
            lines += [f"  {line}" for line in content] or ["  none"]
    return "\n".join(lines)


def _python() -> dict[str, str]:
    import platform
    import sys
    import sysconfig

    free = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
    locked = getattr(sys, "_is_gil_enabled", lambda: True)()
    kind = f", free-threaded build, GIL {'on' if locked else 'off'}" if free else ""
    maker = f"{platform.python_implementation()}, {platform.python_compiler()}"
    return {
        "python": f"{platform.python_version()} ({maker}{kind})",
        "native module": str(sysconfig.get_config_var("SOABI")),
    }


def _packages() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    missing = [n for n in ("numpy", "ml_dtypes", "torch", "jax", "cupy", "apache-tvm-ffi") if n not in found]
    if any(n.startswith("cupy-") for n in found):
        missing = [n for n in missing if n != "cupy"]
    if missing:
        found["not installed"] = ", ".join(missing)
    return found


def _machine() -> dict[str, str]:
    import os
    import platform

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "system": platform.platform(),
        "cpu": f"{_cpu_name() or platform.processor() or platform.machine()}, {usable} of {os.cpu_count()} usable",
    }


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    except OSError:
        return ""


def _devices() -> list[str]:
    from opgraph import _native
    from opgraph.engines.device import DeviceInfo, cuda_absence

    lines = ["cpu"]
    for ordinal in range(_native.device_count()):
        info = DeviceInfo.cuda(ordinal)
        lines.append(f"{info}: {info.name}, sm_{info.sm_version}, {info.sm_count} multiprocessors")
    absence = cuda_absence()
    return [*lines, f"no CUDA device: {absence}"] if absence else lines


def _engines() -> list[str]:
    from opgraph.planning.registry import registry

    lines = []
    for engine in registry.engines():
        ids = ", ".join(str(i) for i in sorted(engine.engine_ids))
        knobs = f"; knobs {', '.join(sorted(engine.knobs))}" if engine.knobs else ""
        lines.append(f"{engine.name}: ids {ids}{knobs}{'; only when named' if engine.named_only else ''}")
    return lines + [f"{name}: {reason}" for name, reason in registry.unavailable().items()]


def _environment() -> dict[str, str]:
    import os

    wanted = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return {k: v for k, v in sorted(os.environ.items()) if k.startswith("OPGRAPH_") or k in wanted}
