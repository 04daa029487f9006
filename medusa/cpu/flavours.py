"""The kinds of processors for which a wheel contains compiled kernels, and the choice among them on a machine.

They differ in the features that the kernels use: the width of vectors, products of 8-bit integers (VNNI), bfloat16, a
matrix unit. ``tools/wheel.py`` compiles for them.
"""

import platform
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

V3 = "abm avx avx2 bmi1 bmi2 cx16 f16c fma lahf_lm movbe pni popcnt sse4_1 sse4_2 ssse3 xsave"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"
"""Levels of x86-64 (psABI, section 3.1.1), by Linux's names of their instructions."""


class Flavour(NamedTuple):
    """A kind of processor: its name, the compiler's target options, and Linux's names of its instructions.

    Options and names are separated by spaces.
    """

    name: str
    flags: str
    needs: str

    def library(self, source: Path) -> Path:
        """The path of a source's compiled library in a wheel, beside the source."""
        return source.with_name(f"{source.stem}-{self.name}.so")


FLAVOURS = {
    "x86_64": (
        Flavour(
            "amx",
            "-march=x86-64-v4 -mavx512vnni -mavx512bf16 -mamx-tile -mamx-bf16",
            f"{V4} avx512_vnni avx512_bf16 amx_tile amx_bf16",
        ),
        Flavour("avx512-bf16", "-march=x86-64-v4 -mavx512vnni -mavx512bf16", f"{V4} avx512_vnni avx512_bf16"),
        Flavour("avx512-vnni", "-march=x86-64-v4 -mavx512vnni", f"{V4} avx512_vnni"),
        Flavour("avx512", "-march=x86-64-v4", V4),
        Flavour("avx2-vnni", "-march=x86-64-v3 -mavxvnni", f"{V3} avx_vnni"),
        Flavour("avx2", "-march=x86-64-v3", V3),
        Flavour("base", "-march=x86-64", ""),
    ),
    "aarch64": (
        Flavour("neon-bf16", "-march=armv8.2-a+bf16", "asimd asimdrdm atomics bf16 crc32"),
        Flavour("neon", "-march=armv8-a", "asimd"),
    ),
}
"""Flavours by ``platform.machine()``; those with more features come first."""


def linux_says(*names: str) -> str | None:
    """The first line of /proc/cpuinfo that begins with one of these names; None if there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((line for line in lines if line.startswith(names)), None)


def processor() -> str:
    """Linux's line about this processor's instructions; on other systems the processor's name."""
    return linux_says("flags", "Features") or platform.processor() or platform.machine()


def processor_name() -> str:
    """The processor's name, as the kernel knows it."""
    said = linux_says("model name", "Model")
    return said.partition(":")[2].strip() if said else platform.processor() or platform.machine()


def avoids_bfloat16() -> bool:
    """Whether vectors could multiply bfloat16, and floats are faster: so it is with Intel. A matrix unit beats both."""
    has = processor().split()
    return "GenuineIntel" in (linux_says("vendor_id") or "") and "avx512_bf16" in has and "amx_tile" not in has


def able() -> Iterable[Flavour]:
    """The flavours that this processor can execute and does not avoid; those with more features come first."""
    has = set(processor().split()) - ({"avx512_bf16"} if avoids_bfloat16() else set())
    return (flavour for flavour in FLAVOURS.get(platform.machine(), ()) if has.issuperset(flavour.needs.split()))


def shipped(source: Path) -> Path | None:
    """The best library of a source in the wheel for this processor; None = there is none."""
    return next((library for flavour in able() if (library := flavour.library(source)).is_file()), None)
