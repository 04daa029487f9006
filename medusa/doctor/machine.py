"""Processor, kernels, memory, GPU and disk, and what decoding can take at best here."""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from medusa.cpu import build, flavours
from medusa.doctor.finding import Finding, install
from medusa.files import cache_directory

GB = 1e9
COMPILERS = {
    "apt-get": "apt-get install g++",
    "dnf": "dnf install gcc-c++",
    "apk": "apk add g++",
    "pacman": "pacman -S gcc",
    "zypper": "zypper install gcc-c++",
    "brew": "xcode-select --install",
}
"""What installs a compiler, by what installs packages."""
QUICK = ("AMX", "AVX512-BF16", "NEON with bfloat16")
"""Flavours of the kernels whose processor multiplies bfloat16 itself."""
CUDA_WHEELS = "https://download.pytorch.org/whl/cu130"
SECONDS = 1.0
"""How long memory is read to measure its bandwidth."""
BUFFER = 1 << 29
"""Bytes that are read: many times the caches."""
LEAST_DISK = 2 * GB
"""Less than this holds no base but the smallest."""
BASES = (
    ("SmolLM2 135M, bfloat16", 135e6, 16),
    ("Llama 3.2 1B, bfloat16", 1.24e9, 16),
    ("Qwen 3 8B, 4 bits", 8.2e9, 4.5),
    ("Qwen 3 8B, bfloat16", 8.2e9, 16),
)
"""Names, weights and bits of each, for an idea of speeds."""


@dataclass(frozen=True)
class Expectation:
    """What plain decoding of a base can reach here: a token reads all weights once."""

    base: str
    bytes: float
    """Of its weights."""
    tokens_per_second: float
    """At most, batch 1, without drafts."""
    fits: bool


def processor() -> Finding:
    """Its name, the cores that this process may use, and who else wants them."""
    name, cores = flavours.processor_name(), _cores()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    figures = {"name": name, "cores": cores, "load": round(load, 2)}
    says = f"{name}, {cores} core{'s' * (cores != 1)}"
    if load > 1.5 * cores:
        says = f"{says}, on which {load:.0f} programs run now: speeds below are too low"
        return Finding("processor", "slow", says, "top", figures)
    return Finding("processor", "ok", says, figures=figures)


def _cores() -> int:
    try:
        from medusa.clock import cores
    except (ImportError, OSError, RuntimeError):  # it needs torch
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores()


def compiler() -> Finding:
    """The C++ compiler that builds the kernels where no wheel has brought them."""
    if library := flavours.shipped(build.SOURCE):
        return Finding("compiler", "ok", f"not needed: the kernels came compiled ({library.name})")
    try:
        version = build.compiler_version()
    except build.NativeUnavailableError as error:
        return Finding("compiler", "slow", f"{error}: decoding runs as transformers does", _get_compiler())
    return Finding("compiler", "ok", version, figures={"version": version})


def _get_compiler() -> str:
    return next((command for tool, command in COMPILERS.items() if shutil.which(tool)), "export CXX=/path/to/g++")


def kernels() -> Finding:
    """Which flavour of the kernels this processor gets; the first time they are built, up to a minute."""
    from medusa.cpu import native

    try:
        flavour = native.kernels().medusa_flavour().decode()
    except build.NativeUnavailableError as error:
        reason = str(error).splitlines()[0]
        return Finding("kernels", "slow", f"{reason}: decoding runs as transformers does", _get_compiler())
    figures = {"flavour": flavour}
    if flavour.startswith(QUICK):
        return Finding(
            "kernels", "ok", f"{flavour}: bfloat16 at the memory's speed, trees cost little", figures=figures
        )
    says = f"{flavour}: weights of 16 bits are widened to 32, so only small trees pay"
    if native.rows_are_whole():
        says += "; packed weights (GGUF, GPTQ, AWQ) are not, and are twice as fast"
    return Finding("kernels", "slow", says, "medusa bench step --base smollm2", figures)


def memory() -> Finding:
    """How much there is, and how fast it is read, measured in a second."""
    from medusa.clock import machine_memory  # it needs torch

    total = machine_memory()
    free = _available(total)
    speed = bandwidth("cpu", min(BUFFER, free // 4))
    figures = {"total": total, "available": free, "bytes_per_second": round(speed)}
    return Finding("memory", "ok", _said(total, free, speed), figures=figures)


def _said(total: int, free: int, speed: float) -> str:
    return f"{total / GB:.1f} GB, {free / GB:.1f} GB of it free, read at {speed / GB:.0f} GB/s"


def _available(total: int) -> int:
    """Bytes that programs can have; all of them where Linux does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return total


def bandwidth(device: str, size: int = BUFFER) -> float:
    """Bytes per second that a device's memory gives at best, of sums over ``size`` bytes for a second."""
    import torch

    from medusa.clock import seconds

    source, best = torch.ones(size // 4, device=device), 0.0
    end = time.perf_counter() + SECONDS
    while not best or time.perf_counter() < end:
        best = max(best, size / seconds(source.sum, source.device))
    return best


def gpus() -> Iterator[Finding]:
    """Each GPU with its memory, or why torch sees none."""
    import torch

    if not torch.cuda.is_available():
        yield _no_gpu(str(torch.__version__), torch.version.cuda)
        return
    for index in range(torch.cuda.device_count()):
        name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
        free, total = torch.cuda.mem_get_info(index)
        speed = bandwidth(f"cuda:{index}", min(4 * BUFFER, free // 4))
        figures = {
            "name": name, "capability": list(capability), "total": total, "available": free,
            "bytes_per_second": round(speed),
        }  # fmt: skip
        yield Finding(
            "gpu", "ok", f"{name} ({capability[0]}.{capability[1]}), {_said(total, free, speed)}", figures=figures
        )
    try:
        import triton
    except ImportError as error:
        yield Finding("triton", "slow", f"cannot be imported: {error}: attention is torch's", install("triton"))
    else:
        yield Finding("triton", "ok", triton.__version__, figures={"version": triton.__version__})


def _no_gpu(version: str, cuda: str | None) -> Finding:
    figures = {"torch_cuda": cuda}
    if not (shutil.which("nvidia-smi") or Path("/proc/driver/nvidia").exists()):
        return Finding("gpu", "ok", "none, the processor computes", figures=figures)
    if cuda:
        says = f"there is an NVIDIA driver, and torch {version} (CUDA {cuda}) finds no GPU"
        return Finding("gpu", "slow", says, "nvidia-smi", figures)
    says = f"there is an NVIDIA driver, and torch {version} knows no CUDA"
    return Finding(
        "gpu", "slow", says, install("torch", options=f"--force-reinstall --index-url {CUDA_WHEELS}"), figures
    )


def disks() -> Iterator[Finding]:
    """Where kernels and downloads are kept: whether that can be written to, and what is free."""
    hub = Path(os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or "~/.cache/huggingface") / "hub")
    with suppress(RuntimeError):  # a user without a home
        hub = hub.expanduser()
    places = {"XDG_CACHE_HOME": cache_directory(), "HF_HOME": hub}
    for variable, place in places.items():
        there = next(parent for parent in (place, *place.parents) if parent.exists())
        free = shutil.disk_usage(there).free
        figures = {"path": str(place), "available": free}
        says = f"{place}: {free / GB:.1f} GB free"
        remedy = f"export {variable}=/a/directory/with/room"
        if not os.access(there, os.W_OK | os.X_OK):
            yield Finding("disk", "slow", f"{place} cannot be written to: nothing is kept there", remedy, figures)
        elif free < LEAST_DISK:
            yield Finding("disk", "slow", f"{says}, little for a base", remedy, figures)
        else:
            yield Finding("disk", "ok", says, figures=figures)


def expectations(places: list[Finding]) -> list[Expectation]:
    """What bases can reach on the fastest memory that was found; nothing where none was."""
    if not places:
        return []
    fastest = max(places, key=lambda place: place.figures["bytes_per_second"]).figures
    return [
        Expectation(name, size := weights * bits / 8, fastest["bytes_per_second"] / size, size < fastest["available"])
        for name, weights, bits in BASES
    ]
