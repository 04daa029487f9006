"""Kinds of processors that a wheel holds compiled kernels for, and the choice among them where it is installed.

They differ in what the kernels distinguish: the width of vectors, products of 8-bit numbers (VNNI), bfloat16, a matrix
unit. ``tools/wheel.py`` compiles for them.
"""

import platform
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

V3 = "abm avx avx2 bmi1 bmi2 cx16 f16c fma lahf_lm movbe pni popcnt sse4_1 sse4_2 ssse3 xsave"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"
"""Levels of x86-64 (its psABI, section 3.1.1), as Linux names their instructions."""


class Flavour(NamedTuple):
    """A kind of processor: its name, what the compiler may use, and how Linux names that, both separated by spaces."""

    name: str
    flags: str
    needs: str

    def library(self, source: Path) -> Path:
        """Where a wheel holds what a source compiles to, beside it."""
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
"""By ``platform.machine()``, the most able first."""


def linux_says(*names: str) -> str | None:
    """The first line of /proc/cpuinfo that begins with one of these names; None where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((line for line in lines if line.startswith(names)), None)


def processor() -> str:
    """What Linux says of this processor's instructions in one line; on other systems its name."""
    return linux_says("flags", "Features") or platform.processor() or platform.machine()


def able() -> Iterable[Flavour]:
    """The flavours that this processor can execute, the most able first."""
    has = set(processor().split())
    return (flavour for flavour in FLAVOURS.get(platform.machine(), ()) if has.issuperset(flavour.needs.split()))


def shipped(source: Path) -> Path | None:
    """The library of a source that a wheel has brought and that suits this processor best; None = there is none."""
    return next((library for flavour in able() if (library := flavour.library(source)).is_file()), None)
