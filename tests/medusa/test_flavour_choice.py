"""Kernels that a wheel brings: which of them a processor takes, and when none of them is taken."""

import platform
import shutil
import subprocess

import pytest

from medusa.cpu import build, flavours

V2 = "cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3"
HASWELL = f"fpu sse2 {V2} abm avx avx2 bmi1 bmi2 f16c fma movbe xsave"
SKYLAKE = f"{HASWELL} avx512f avx512bw avx512cd avx512dq avx512vl"
LINUX_NAMES = {"bmi": "bmi1", "crc32": "sse42", "lahfsahf": "lahflm", "lzcnt": "abm", "sse3": "pni"}
LINUX_NAMES |= {"armfeatureatomics": "atomics", "armfeaturecrc32": "crc32", "armfeatureqrdmx": "asimdrdm"}
COMPILERS = {"x86_64": "g++", "aarch64": "aarch64-linux-gnu-g++"} | {platform.machine(): "g++"}


@pytest.fixture(autouse=True)
def forget():
    build.load.cache_clear()
    yield
    build.load.cache_clear()


@pytest.mark.parametrize(
    ("machine", "has", "name"),
    [
        ("x86_64", f"{SKYLAKE} avx512_vnni avx512_bf16 avx_vnni amx_tile amx_bf16 amx_int8", "amx"),  # Sapphire Rapids
        ("x86_64", f"{SKYLAKE} avx512_vnni avx512_bf16", "avx512-bf16"),  # Zen 4
        ("x86_64", f"{SKYLAKE} avx512_vnni", "avx512-vnni"),  # Ice Lake
        ("x86_64", SKYLAKE, "avx512"),
        ("x86_64", f"{HASWELL} avx_vnni", "avx2-vnni"),  # Alder Lake
        ("x86_64", HASWELL, "avx2"),
        ("x86_64", f"fpu sse2 {V2} avx", "base"),  # Sandy Bridge
        ("aarch64", "fp asimd atomics crc32 asimdrdm sve bf16 i8mm", "neon-bf16"),  # Neoverse V1
        ("aarch64", "fp asimd atomics crc32 asimdrdm", "neon"),  # Neoverse N1
        ("aarch64", "fp asimd crc32", "neon"),
    ],
)
def test_a_processor_takes_the_most_able_kernels_that_it_can_execute(machine, has, name, monkeypatch, tmp_path):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(flavours, "processor", lambda: f"flags\t\t: {has}")
    monkeypatch.setattr(flavours, "linux_says", lambda *_: "vendor_id\t: AuthenticAMD")
    source = tmp_path / "kernels.cpp"
    assert flavours.shipped(source) is None
    for flavour in flavours.FLAVOURS[machine]:
        flavour.library(source).touch()
    assert flavours.shipped(source) == tmp_path / f"kernels-{name}.so"
    monkeypatch.setattr(flavours, "linux_says", lambda *_: "vendor_id\t: GenuineIntel")  # whose vectors prefer floats
    intel = {"avx512-bf16": "avx512-vnni"}.get(name, name)
    assert flavours.shipped(source) == tmp_path / f"kernels-{intel}.so"


@pytest.mark.parametrize(
    ("machine", "flavour"), [(machine, each) for machine, those in flavours.FLAVOURS.items() for each in those]
)
def test_the_compiler_may_use_only_what_a_flavour_asks_of_processors(machine, flavour):
    compiler = COMPILERS[machine]
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler}")

    def uses(flags):
        command = [compiler, *flags.split(), "-dM", "-E", "-x", "c++", "/dev/null"]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        macros = {line.split()[1].strip("_").lower().replace("_", "") for line in said.splitlines()}
        return {macro for macro in macros if not macro.startswith(("evex", "fpfast", "gcc"))}

    least = flavours.FLAVOURS[machine][-1]
    used = {LINUX_NAMES.get(name, name) for name in uses(flavour.flags) - uses(least.flags)}
    used = {"bf16" if name.startswith("armfeaturebf16") else name for name in used}
    assert used <= set(flavour.needs.replace("_", "").split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("machine", "flavour"),
    [pytest.param(machine, each, id=each.name) for machine, those in flavours.FLAVOURS.items() for each in those],
)
def test_each_flavour_compiles(machine, flavour):
    """On any machine: few can execute all, and a fault in the others would show nowhere else."""
    if shutil.which(COMPILERS[machine]) is None:
        pytest.skip(f"there is no {COMPILERS[machine]}")
    command = [COMPILERS[machine], *build.FLAGS, "-fopenmp", *flavour.flags.split(), "-fsyntax-only", build.SOURCE]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:2000]


def test_what_a_wheel_brings_needs_no_compiler_and_flags_for_one_set_it_aside(monkeypatch, tmp_path):
    flavour = next(iter(flavours.able()), None)
    if flavour is None or shutil.which("g++") is None:
        pytest.skip("there is no g++, or no flavour for this processor")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / "small.cpp"
    source.write_text('extern "C" int answer() { return 1; }')
    build.compile_library(source, ["g++"], [*build.FLAGS, *flavour.flags.split()], flavour.library(source))
    source.write_text('extern "C" int answer() { return 2; }')
    with monkeypatch.context() as without:
        without.setenv("PATH", str(tmp_path))
        without.delenv("CXX", raising=False)
        assert build.load(source).answer() == 1
    build.load.cache_clear()
    monkeypatch.setenv(build.EXTRA_FLAGS, "-O1")
    assert build.load(source).answer() == 2


def test_a_library_that_cannot_be_loaded_is_no_kernel(monkeypatch, tmp_path):
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(flavours, "processor", lambda: "flags : fpu")
    (tmp_path / "small-base.so").write_text("not a library")
    with pytest.raises(build.NativeUnavailableError, match=r"\(small.cpp\) does not build or load: .*small-base.so"):
        build.load(tmp_path / "small.cpp")
