"""Build only; metadata lives in pyproject.toml. One table of libraries, sources and flags becomes
build/build.ninja; ninja does the work.

    python setup.py build_ext --inplace    the daily loop: compiles what changed, into photon_ext/
    pip install -e . --no-build-isolation  an editable install (the same build directory, so nothing
                                           is compiled twice)
    python setup.py develop                the same, by its old name
    python setup.py build_emulator         for tests without a GPU: the CUDA kernels by the C++
                                           compiler, into build/emulated/
    python setup.py bdist_wheel            a wheel; see make wheel

PHOTON_CUDA=1 insists on the CUDA kernels, PHOTON_CUDA=0 leaves them out; otherwise they are built
where nvcc is found and torch has CUDA. A GPU is not needed to build them, and with PHOTON_CUDA=1
neither is a torch with CUDA: _ops speaks torch's stable ABI and links the CUDA runtime statically.
PHOTON_SM_100=1 adds machine code for compute capability 10.0, where the Hopper kernels are
untested. PHOTON_PYTHONS="python3.10 python3.12" builds _C for these, too: a wheel for them needs no
more than their headers. PHOTON_STAMPS=1 builds kernels that note the time at points within them,
for benchmarks/lab/stamps.py.
"""

from __future__ import annotations

import fcntl
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from setuptools import Command, Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import SetupError

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # before setuptools 70.1
    from wheel.bdist_wheel import bdist_wheel

ROOT = Path(__file__).resolve().parent
BUILD = ROOT / "build"
PACKAGE = ROOT / "photon_ext"

CXX_FLAGS = "-O3 -std=c++17 -fPIC -pthread -Wall -Wextra -Werror -fvisibility=hidden -Icsrc"
# take a minute or two each: begun last, they would be waited for alone
SLOWEST = (
    "linear_tile.cu",
    "linear_tile_norm.cu",
    "attention.cu",
    "fp8_attention.cu",
    "chunk_attention.cu",
    "fp8_chunk_attention.cu",
    "split_attention.cu",
    "fp8_split_attention.cu",
    "sample_bf16.cu",
    "sample_f16.cu",
    "sample_f32.cu",
)
NVCC_FLAGS = "-O3 -std=c++17 -Werror all-warnings -Xcompiler -fPIC,-Wall,-fvisibility=hidden -Icsrc"
LINK_FLAGS = "-shared -pthread -Wl,--as-needed"
# compute capability to compile for -> the codes to keep; PTX of the oldest serves what is not
# listed
PORTABLE_ARCHS = {"compute_80": "[sm_80,compute_80]", "compute_90a": "sm_90a"}
HOPPER_ARCHS = {"compute_90a": "sm_90a"}
# Only with PHOTON_SM_100=1, and then of every source: an early launch, which is allowed where the
# Hopper kernels run, needs kernels that wait.
SM_100_ARCHS = {"compute_100a": "sm_100a"}
# whose kernels are launched where hopper_runs() alone: see csrc/cuda/launch.cuh
HOPPER = (
    "batch_fp8",
    "batch_linear",
    "batch_stored",
    "balanced_attention",
    "balanced_plan",
    "fp8_split_attention",
    "split_attention",
    "stream_linear",
    "large_linear",
    "mid_stored",
    "narrow_int4",
    "narrow_stored",
    "sum_norm",
    "warp_attention",
)
OLDEST_NVCC = (12, 8)  # the first that knows compute_100a
# the stable ABI of torch 2.11: what is built runs on that version and later ones
TORCH_TARGET = "0x020b000000000000"
PYTHON_TARGET = "0x030a0000"  # the limited API of Python 3.10
# CUDA sources for the emulator in tests/emulator, whose headers come before csrc. As with nvcc, a
# load by another type reads what is there; and nothing fuses but fmaf.
EMULATOR_FLAGS = (
    "-O2 -march=native -fno-strict-aliasing -ffp-contract=off -Wno-unknown-pragmas -Wno-psabi "
)
EMULATOR_FLAGS += "-iquote tests/emulator/include -Itests/emulator/include -DPHOTON_SM_100"
# the compiler reports what kernels of a chain read and write: see tests/emulator/engine/memory.cpp
CHAINED = (
    "batch_fp8",
    "batch_linear",
    "batch_stored",
    "dequantize",
    "embedding",
    "balanced_attention",
    "balanced_plan",
    "kernels",
    "lora_link",
    "mlp",
    "norm",
    "quantize",
    "rope_append",
    "sample_bf16",
    "sample_f16",
    "sample_f32",
    "fp8_split_attention",
    "split_attention",
    "step",
    "stream_linear",
    "large_linear",
    "mid_stored",
    "narrow_int4",
    "narrow_stored",
    "sum_norm",
    "warp_attention",
)
STAMPED = ("split_attention", "stream_linear")  # what hands out its stamps (csrc/cuda/stamps.cuh)
ACCESS_FLAGS = "-fsanitize=thread --param tsan-instrument-func-entry-exit=0"
SIMD_ISAS = {
    "baseline": "-march=x86-64-v2",
    "avx2": "-march=x86-64-v3",
    "avx512": "-march=x86-64-v4",
}


@dataclass(frozen=True)
class Python:
    """A Python that _C is built for.

    Attributes:
        tag: "cp311", as wheels name it.
        include: where its headers are.
        suffix: of its extension modules.
        variant: of object files; "": it is the one that builds.
    """

    tag: str
    include: str
    suffix: str
    variant: str = ""

    @classmethod
    def of(cls, command: str) -> Python:
        """Of an interpreter by its command."""
        question = (
            "import sys, sysconfig as of; print(*sys.version_info[:2], sep='', end=' '); "
            "print(of.get_path('include'), of.get_config_var('EXT_SUFFIX'))"
        )
        try:
            version, include, suffix = run(command, "-c", question).split()
        except (OSError, ValueError, subprocess.CalledProcessError) as error:
            raise SetupError(
                f"PHOTON_PYTHONS names {command!r}, which does not answer like Python: {error}"
            ) from None
        if not Path(include, "Python.h").exists():
            raise SetupError(
                f"PHOTON_PYTHONS names {command!r}, and {include} has no Python.h: install its "
                "headers (Debian: python3-dev)"
            )
        return cls(f"cp{version}", include, suffix, f"cp{version}")


THIS_PYTHON = Python(
    f"cp{sys.version_info.major}{sys.version_info.minor}",
    sysconfig.get_path("include"),
    str(sysconfig.get_config_var("EXT_SUFFIX")),
)


def other_pythons() -> list[Python]:
    """Those that PHOTON_PYTHONS names, besides the one that builds."""
    found = map(Python.of, os.environ.get("PHOTON_PYTHONS", "").split())
    return [python for python in found if python.tag != THIS_PYTHON.tag]


@dataclass(frozen=True)
class Library:
    """One shared library: which sources it is made of, and which flags they need besides the
    common ones.
    """

    name: str
    file: str
    sources: tuple[str, ...]  # globs, relative to the repository
    needs_torch: bool = False
    python: Python | None = None  # which it is a module of; it needs pybind11
    link_flags: str = ""


def native_module(python: Python) -> Library:
    sources = "csrc/python/*.cpp", "csrc/device/*.cpp"
    return Library("_C", f"_C{python.suffix}", sources, python=python)


LIBRARIES = (
    Library(
        "_ops",
        "_ops.abi3.so",
        ("csrc/cuda/*/*.cu", "csrc/ops/*.cpp", "csrc/cpu/*.cpp", "csrc/cpu/simd/*.cpp"),
        needs_torch=True,
        link_flags="-Wl,-z,defs",  # a kernel that is declared and missing fails here, not at import
    ),
    native_module(THIS_PYTHON),
)


# --- What this machine has ------------------------------------------------------------------------


@dataclass(frozen=True)
class Cuda:
    """A CUDA toolkit: its compiler as called (perhaps a wrapper script), and the directory that
    really holds headers and libraries.
    """

    nvcc: str
    version: str
    root: Path

    @property
    def library_dir(self) -> Path:
        for candidate in (self.root / "lib64", self.root / "lib"):
            if (candidate / "libcudart_static.a").exists():
                return candidate
        raise SetupError(
            f"{self.root} has no lib64/libcudart_static.a: install the CUDA runtime's static "
            "library, or build with PHOTON_CUDA=0"
        )


def run(*command: str) -> str:
    return subprocess.run(
        command, check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ).stdout


def torch_has_cuda() -> bool:
    """Whether the torch to build with is one for CUDA, on any machine."""
    import_build_tools()
    import torch

    return torch.version.cuda is not None


def find_cuda() -> Cuda | None:
    """The toolkit to build with, or None.

    PHOTON_CUDA=0 never looks; PHOTON_CUDA=1 never does without. Otherwise a torch without CUDA
    never looks either: it could run none of the kernels, which take minutes to build.
    """
    wish = os.environ.get("PHOTON_CUDA", "")
    if wish not in ("", "0", "1"):
        raise SetupError(
            f"PHOTON_CUDA={wish!r} is not understood: 1 insists on the CUDA kernels, 0 leaves them "
            "out, unset builds them where nvcc is found and torch has CUDA"
        )
    if wish == "0" or (wish == "" and not torch_has_cuda()):
        return None
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    candidates = [f"{home}/bin/nvcc" for home in homes] + ["nvcc", "/usr/local/cuda/bin/nvcc"]
    nvcc = next((found for found in map(shutil.which, candidates) if found), None)
    if nvcc is None:
        if wish == "1":
            raise SetupError(
                f"PHOTON_CUDA=1, but nvcc is in none of {candidates}: install the CUDA toolkit "
                "(12.8 or newer) and put nvcc on PATH "
                "or set CUDA_HOME; or build the CPU side alone with PHOTON_CUDA=0"
            )
        return None
    release = re.search(r"release (\d+)\.(\d+)", run(nvcc, "--version"))
    # nvcc may be a wrapper script anywhere; only its dry run tells where the toolkit is.
    top = re.search(
        r"^#\$ TOP=(.+)$",
        run(nvcc, "-dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull),
        re.MULTILINE,
    )
    if release is None or top is None:
        raise SetupError(
            f"{nvcc} does not answer like nvcc: check it with `{nvcc} --version`, or build with "
            "PHOTON_CUDA=0"
        )
    if (int(release[1]), int(release[2])) < OLDEST_NVCC:
        raise SetupError(
            f"{nvcc} is release {release[1]}.{release[2]}; 12.8 or newer is needed: update it, or "
            "build with PHOTON_CUDA=0"
        )
    return Cuda(nvcc, f"{release[1]}.{release[2]}", Path(top[1]).resolve())


def has_stamps() -> bool:
    """Whether PHOTON_STAMPS is 1."""
    return os.environ.get("PHOTON_STAMPS") == "1"


def has_sm_100() -> bool:
    """Whether PHOTON_SM_100 is 1."""
    return os.environ.get("PHOTON_SM_100") == "1"


def cuda_archs(source: Path) -> dict[str, str]:
    """What a CUDA source is compiled for, and the codes to keep."""
    archs = HOPPER_ARCHS if source.stem in HOPPER else PORTABLE_ARCHS
    return archs | (SM_100_ARCHS if has_sm_100() else {})


def import_build_tools() -> None:
    """Fails early, in words, where a package that the build needs is missing."""
    for package, hint in (
        ("torch", "pip install torch==2.13.0"),
        ("pybind11", "pip install pybind11"),
    ):
        try:
            __import__(package)
        except ImportError as error:
            raise SetupError(
                f"{sys.executable} cannot import {package} ({error}). photon_ext is built against "
                f"the one it will run with: {hint}, "
                "then build again. With pip, add --no-build-isolation: an isolated build does not "
                "see installed packages."
            ) from None


def find_cxx() -> str:
    import_build_tools()
    cxx = os.environ.get("CXX", "g++")
    if shutil.which(cxx) is None:
        raise SetupError(
            f"no C++ compiler: {cxx} was not found; install g++ (Debian: apt install g++), or set "
            "CXX"
        )
    return cxx


def find_ninja() -> list[str]:
    try:
        import ninja

        return [str(Path(ninja.BIN_DIR) / "ninja")]
    except ImportError:
        found = shutil.which("ninja")
    if found is None:
        raise SetupError("ninja was not found: pip install ninja")
    return [found]


# --- The ninja file -------------------------------------------------------------------------------


def sources(*patterns: str) -> list[Path]:
    """The files of each pattern, SLOWEST first: ninja begins in this order."""
    return [
        source
        for pattern in patterns
        for source in sorted(
            (path.relative_to(ROOT) for path in ROOT.glob(pattern)),
            key=lambda source: (source.name not in SLOWEST, source),
        )
    ]


def object_file(source: Path, variant: str) -> str:
    return f"build/obj/{source}{'.' + variant if variant else ''}.o"


def cpu_variants(source: Path) -> dict[str, str]:
    """What a source of csrc/cpu is compiled to: variant -> flags.

    It sees neither torch nor CUDA.
    """
    if source.parent.name != "simd":
        return {"": ""}
    isas = SIMD_ISAS if platform.machine() == "x86_64" else {"baseline": ""}
    return {isa: f"-DPHOTON_ISA={isa} {march}" for isa, march in isas.items()}


def kernel_flags(source: Path, access: str) -> str:
    """What a CUDA source needs to be compiled for the emulator; `access`: so that accesses are
    reported, of kernels that are launched programmatically.
    """
    return f"-x c++ {access if source.stem in CHAINED else ''}"


@dataclass
class Plan:
    """What to compile and link, as lines of a ninja file whose paths are relative to the
    repository.
    """

    cuda: Cuda | None
    cxx: str
    directory: str = "build"
    lines: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)

    def write_rules(self) -> None:
        self.lines += [
            f"builddir = {self.directory}",
            *(
                "rule cxx",
                f"  command = {self.cxx} -MMD -MF $out.d {CXX_FLAGS} $flags -c $in -o $out",
            ),
            *("  depfile = $out.d", "  deps = gcc", "  description = c++ $out"),
            *(
                "rule link",
                f"  command = {self.cxx} {LINK_FLAGS} $in -o $out $flags",
                "  description = link $out",
            ),
        ]
        if self.cuda:
            self.lines += [
                "rule nvcc",
                f"  command = {self.cuda.nvcc} -MMD -MF $out.d {NVCC_FLAGS} $flags -c $in -o $out",
                "  depfile = $out.d",
                "  deps = gcc",
                "  description = nvcc $out",
            ]

    def compile_cuda(self, source: Path) -> str:
        flags = [f"-gencode arch={arch},code={code}" for arch, code in cuda_archs(source).items()]
        if has_sm_100():
            flags.append("-DPHOTON_SM_100")
        stamped = has_stamps() and source.stem in STAMPED
        if stamped:
            flags.append("-DPHOTON_STAMPS")
        return self.compile("nvcc", source, " ".join(flags), "stamps" if stamped else "")

    def compile(self, rule: str, source: Path, flags: str = "", variant: str = "") -> str:
        target = object_file(source, variant)
        self.lines += [f"build {target}: {rule} {source}"] + (
            [f"  flags = {flags}"] if flags else []
        )
        return target

    def link(self, output: str, objects: list[str], flags: str) -> None:
        self.lines += [f"build {output}: link {' '.join(objects)}", f"  flags = {flags}"]
        self.outputs.append(output)

    def add(self, library: Library) -> None:
        flags, link_flags = self.flags(library)
        objects: list[str] = []
        for source in sources(*library.sources):
            if source.suffix == ".cu":
                objects += [self.compile_cuda(source)] if self.cuda else []
            elif "cpu" in source.parts:
                objects += [
                    self.compile("cxx", source, own_flags, variant)
                    for variant, own_flags in cpu_variants(source).items()
                ]
            else:
                variant = library.python.variant if library.python else ""
                objects.append(self.compile("cxx", source, flags, variant))
        self.link(f"photon_ext/{library.file}", objects, link_flags)

    def add_emulated(self, library: Library, sanitizer: str) -> None:
        """The library with emulated CUDA kernels in the place of its CPU kernels, and the
        kernels that the emulator is tested with.
        """
        flags, link_flags = self.flags(library)
        variant = Path(self.directory).name
        sanitize = f"-fsanitize={sanitizer} -g" if sanitizer else ""
        access = "" if sanitizer else ACCESS_FLAGS
        flags += f" {EMULATOR_FLAGS} -DPHOTON_EMULATED_CUDA {sanitize}"
        engine = [
            self.compile("cxx", source, f"{EMULATOR_FLAGS} -O3 {sanitize}", variant)
            for source in sources("tests/emulator/engine/*.cpp")
        ]
        objects: list[str] = []
        for source in sources(*library.sources):
            # compiled already: what the library says about threads and instruction sets stays
            if "cpu" in source.parts:
                objects += [object_file(source, isa) for isa in cpu_variants(source)]
            else:
                objects.append(
                    self.compile(
                        "cxx",
                        source,
                        f"{flags} {kernel_flags(source, access)}"
                        if source.suffix == ".cu"
                        else flags,
                        variant,
                    )
                )
        self.link(f"{self.directory}/{library.file}", engine + objects, f"{link_flags} {sanitize}")
        source = Path("tests/emulator/kernels.cu")
        kernels = self.compile(
            "cxx", source, f"{EMULATOR_FLAGS} {sanitize} {kernel_flags(source, access)}", variant
        )
        self.link(f"{self.directory}/kernels.so", [*engine, kernels], sanitize)

    def run(self) -> None:
        """Compiles and links what has changed."""
        file = Path(self.directory) / "build.ninja"
        write_if_changed(ROOT / file, "\n".join(self.lines) + "\n")
        jobs = os.environ.get("MAX_JOBS", str(len(os.sched_getaffinity(0))))
        if subprocess.run(
            [*find_ninja(), "-f", str(file), "-k", "0", "-j", jobs], cwd=ROOT
        ).returncode:
            raise SetupError("the build failed; the compiler's messages are above")

    def flags(self, library: Library) -> tuple[str, str]:
        """Compiler and linker flags that this library needs besides the common ones."""
        compile_flags: list[str] = []
        link_flags = [library.link_flags]
        if library.needs_torch:
            import torch

            root = Path(torch.__file__).parent
            compile_flags += [
                f"-isystem {root}/include",
                f"-DTORCH_TARGET_VERSION={TORCH_TARGET}",
                f"-DPy_LIMITED_API={PYTHON_TARGET}",
            ]
            link_flags += [
                f"-L{root}/lib",
                "-Wl,--no-as-needed -ltorch_cpu -ltorch -Wl,--as-needed",
            ]
        if library.python is not None:
            import pybind11

            compile_flags += [
                f"-isystem {library.python.include}",
                f"-isystem {pybind11.get_include()}",
            ]
        if self.cuda:
            compile_flags += ["-DPHOTON_WITH_CUDA", f"-isystem {self.cuda.root}/include"]
            # Static and hidden: torch may bring a shared runtime of its own.
            link_flags += [
                f"-L{self.cuda.library_dir}",
                "-lcudart_static -Wl,--exclude-libs,ALL -ldl -lrt",
            ]
        return " ".join(compile_flags), " ".join(link_flags)


def write_if_changed(path: Path, text: str) -> None:
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def built_codes() -> list[str]:
    """The codes for which any CUDA source is compiled."""
    archs = PORTABLE_ARCHS | HOPPER_ARCHS | (SM_100_ARCHS if has_sm_100() else {})
    return [code for codes in archs.values() for code in codes.strip("[]").split(",")]


def build_record(cuda: Cuda | None, cxx: str) -> str:
    """The source of photon_ext/_build_info.py: what the libraries beside it were built with."""
    import torch

    record = {
        "cuda": cuda.version if cuda else None,
        "cuda_archs": built_codes() if cuda else [],
        "cxx": run(cxx, "--version").splitlines()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_target": f"{int(TORCH_TARGET, 16) >> 56}.{int(TORCH_TARGET, 16) >> 48 & 0xFF}",
        "machine": platform.machine(),
        "stamps": has_stamps(),
    }
    lines = "".join(f"    {key!r}: {value!r},\n" for key, value in record.items())
    return f'"""Written by setup.py."""\n\nBUILD_INFO: dict[str, object] = {{\n{lines}}}\n'


class NinjaBuild(build_ext):
    """build_ext by ninja, always into photon_ext/; a wheel gets copies."""

    def run(self) -> None:
        plan = Plan(find_cuda(), find_cxx())
        plan.write_rules()
        for library in (*LIBRARIES, *map(native_module, other_pythons())):
            plan.add(library)
        BUILD.mkdir(exist_ok=True)
        with open(BUILD / ".lock", "w") as lock:
            # ninja does not guard its directory against a second ninja
            fcntl.flock(lock, fcntl.LOCK_EX)
            # it must not speak of an earlier build if this one fails
            (PACKAGE / "_build_info.py").unlink(missing_ok=True)
            plan.run()
            (PACKAGE / "_build_info.py").write_text(build_record(plan.cuda, plan.cxx))
        if not (self.inplace or self.editable_mode):
            target = Path(self.build_lib) / "photon_ext"
            target.mkdir(parents=True, exist_ok=True)
            for output in (*plan.outputs, "photon_ext/_build_info.py"):
                shutil.copy2(ROOT / output, target)

    def get_outputs(self) -> list[str]:
        return [str(Path(self.build_lib) / "photon_ext" / library.file) for library in LIBRARIES]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class Wheel(bdist_wheel):
    """A wheel of each Python that it has a _C for."""

    def get_tag(self) -> tuple[str, str, str]:
        pythons = sorted((THIS_PYTHON, *other_pythons()), key=lambda one: int(one.tag[2:]))
        return ".".join(one.tag for one in pythons), "none", super().get_tag()[2]


class PlainCommand(Command):
    """A command without options."""

    user_options: ClassVar[list[tuple[str, str | None, str]]] = []

    def initialize_options(self) -> None:
        pass

    def finalize_options(self) -> None:
        pass


class BuildEmulator(PlainCommand):
    """The ops library of tests/emulator, after build_ext: see tests/emulator/README.md.

    PHOTON_EMULATOR_ASAN=1: with AddressSanitizer.
    """

    def run(self) -> None:
        asan = os.environ.get("PHOTON_EMULATOR_ASAN") == "1"
        plan = Plan(None, find_cxx(), "build/emulated-asan" if asan else "build/emulated")
        plan.write_rules()
        plan.add_emulated(LIBRARIES[0], "address" if asan else "")
        (ROOT / plan.directory).mkdir(parents=True, exist_ok=True)
        with open(BUILD / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            needed = [
                object_file(source, isa)
                for source in sources("csrc/cpu/**/*.cpp")
                for isa in cpu_variants(source)
            ]
            missing = [file for file in needed if not (ROOT / file).exists()]
            if missing:
                raise SetupError(
                    f"{missing[0]} is missing: run `python setup.py build_ext --inplace` first"
                )
            plan.run()


class Develop(PlainCommand):
    """`setup.py develop` as people know it.

    setuptools' own isolates the build since version 80, and then misses the installed torch.
    """

    def run(self) -> None:
        import_build_tools()
        done = subprocess.run(
            [sys.executable, "-m", "pip", "install", "-e", ".", "--no-build-isolation"], cwd=ROOT
        )
        if done.returncode:
            raise SetupError(
                "pip could not install it; its messages are above. It needs setuptools, wheel and "
                "ninja installed beside torch"
            )


if __name__ == "__main__":
    setup(
        license="Apache-2.0",
        ext_modules=[Extension(f"photon_ext.{library.name}", []) for library in LIBRARIES],
        cmdclass={
            "build_ext": NinjaBuild,
            "build_emulator": BuildEmulator,
            "bdist_wheel": Wheel,
            "develop": Develop,
        },
        # A plain .pth: scripts beside the checkout shall import the package, not its folder.
        options={"editable_wheel": {"mode": "compat"}},
    )
