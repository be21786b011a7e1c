# SPDX-License-Identifier: Apache-2.0
"""What this machine is, one guarded probe a fact. Benchmark records keep it; ``kda-cupy doctor`` judges it.

No probe raises. Where a fact cannot be had stands an :class:`Unavailable`: a string that says why.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from kda_cupy import cubins, sources
from kda_cupy.gpu import cuda_version, installed_wheels

T = TypeVar("T")

CHECKOUT = Path(__file__).parents[1]
"""The clone, if this is one."""
_VARIABLES = re.compile(r"(CUDA|CUPY|KDA_CUPY)_\w+|LD_LIBRARY_PATH|NVIDIA_VISIBLE_DEVICES")


class Unavailable(str):
    """Stands where a fact is missing, and says why."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, by CuPy's number."""

    index: int
    name: str
    compute_capability: str
    multiprocessors: int
    l2_bytes: int
    memory_bytes: int
    free_bytes: int | Unavailable
    pci_bus_id: str
    clocks_mhz: dict[str, int] | Unavailable
    """Of the multiprocessors and of the memory, now and at most. Needs nvidia-ml-py."""


@dataclass(frozen=True, slots=True)
class Cache:
    """Where CuPy keeps compiled kernels."""

    folder: str
    exists: bool
    writable: bool | Unavailable
    """True, or why not. A missing folder counts if it can be made, for CuPy makes it."""
    size_bytes: int | Unavailable


@dataclass(frozen=True, slots=True)
class CompiledAhead:
    """The folder that ``kda-cupy warmup`` fills."""

    folder: str
    named: bool
    """By the variable KDA_CUPY_CUBINS; else it is the one inside the package."""
    exists: bool
    kernels: dict[str, int]
    """How many whole kernels from the sources of this version, by architecture (``"sm_90"``)."""
    outdated: int
    """Whole, but made from other sources: never loaded."""
    damaged: dict[str, str]
    """Why they are not used, by name."""


@dataclass(frozen=True, slots=True)
class Environment:
    """What decides whether kernels run here, and how fast. Every ``str`` may be an :class:`Unavailable`."""

    kda_cupy: str
    commit: str
    uncommitted_changes: bool | Unavailable
    python: str
    platform: str
    cpu: str
    cpu_count: int | None
    numpy: str
    ml_dtypes: str
    cupy: str
    cupy_wheels: dict[str, str]
    """Version by name of the distribution."""
    driver: str
    """The CUDA version that the driver supports, such as 13.0."""
    driver_release: str
    """NVIDIA's own number of the driver, such as 580.82.07. Needs nvidia-ml-py."""
    driver_gpus: int | Unavailable
    """How many GPUs the driver shows, whatever CuPy says."""
    runtime: str
    """The CUDA runtime that is built into CuPy."""
    nvrtc: str
    nvrtc_architectures: list[int] | Unavailable
    """Compute capabilities that NVRTC compiles for: 90 is 9.0."""
    headers: str
    """Folder with the CUDA headers that CuPy uses."""
    headers_version: str
    """The CUDA version that they say they are of."""
    gpus: list[Gpu] | Unavailable
    cache: Cache
    temporary_folder: str
    """Where CuPy writes the source of a kernel that is compiled; an Unavailable also if it would fail to."""
    compiled_ahead: CompiledAhead
    variables: dict[str, str]


def collect(devices: Iterable[int] | None = None) -> dict[str, object]:
    """:func:`probe` as plain data, for JSON."""
    return asdict(probe(devices))


def probe(devices: Iterable[int] | None = None) -> Environment:
    """Ask everything. ``devices`` limits the GPUs looked at: to ask for free memory makes a context on each."""
    cupy = attempt(load_cupy)
    driver, driver_gpus = probe_driver()

    def ask(question: Callable[[Any], T]) -> T | Unavailable:
        return cupy if isinstance(cupy, Unavailable) else attempt(partial(question, cupy))

    return Environment(
        kda_cupy=attempt(_package_version),
        commit=attempt(lambda: _git("rev-parse", "HEAD")),
        uncommitted_changes=attempt(lambda: bool(_git("status", "--porcelain", "--untracked-files=no"))),
        python=platform.python_version(),
        platform=platform.platform(),
        cpu=attempt(_cpu_name),
        cpu_count=os.cpu_count(),
        numpy=attempt(lambda: importlib.metadata.version("numpy")),
        ml_dtypes=attempt(lambda: importlib.metadata.version("ml_dtypes")),
        cupy=ask(lambda cupy: str(cupy.__version__)),
        cupy_wheels=installed_wheels(),
        driver=driver,
        driver_release=attempt(_driver_release),
        driver_gpus=driver_gpus,
        runtime=ask(lambda cupy: cuda_version(cupy.cuda.runtime.runtimeGetVersion())),
        nvrtc=ask(lambda cupy: ".".join(map(str, cupy.cuda.nvrtc.getVersion()))),
        nvrtc_architectures=ask(lambda cupy: list(cupy.cuda.nvrtc.getSupportedArchs())),
        headers=attempt(_cuda_headers),
        headers_version=attempt(lambda: _headers_version(Path(_cuda_headers()))),
        gpus=ask(partial(probe_gpus, devices=devices)),
        cache=probe_cache(os.environ),
        temporary_folder=attempt(_temporary_folder),
        compiled_ahead=probe_compiled_ahead(),
        variables={name: value for name, value in sorted(os.environ.items()) if _VARIABLES.fullmatch(name)},
    )


def attempt(question: Callable[[], T]) -> T | Unavailable:
    """Return the answer, or why there is none."""
    try:
        return question()
    except Exception as error:  # a broken installation may raise anything, and that is the answer
        return Unavailable(_reason(error))


def _reason(error: Exception) -> str:
    if isinstance(error, (ModuleNotFoundError, importlib.metadata.PackageNotFoundError)) and error.name:
        return f"{error.name} is not installed"
    if isinstance(error, ImportError) and isinstance(error.__cause__, Exception):
        return _reason(error.__cause__)  # CuPy wraps the error that matters in a page of advice
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def load_cupy() -> Any:
    """Import CuPy. It raises more than ImportError: OSError, for one, if it cannot make its cache folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are two wheels is the doctor's to say
        import cupy
    return cupy


def probe_driver(load: Callable[[str], Any] = ctypes.CDLL) -> tuple[str, int | Unavailable]:
    """CUDA version of the driver and how many GPUs it shows. Asks its library, so it answers without CuPy too."""
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    version, count, text = ctypes.c_int(), ctypes.c_int(), ctypes.c_char_p()
    try:
        library = load(name)
        library.cuDriverGetVersion(ctypes.byref(version))
        status = library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(count))
        if status:
            library.cuGetErrorString(status, ctypes.byref(text))
    except (OSError, AttributeError):
        missing = Unavailable(f"{name} cannot be loaded")
        return missing, missing
    why = Unavailable(f"{(text.value or b'unknown error').decode()} (CUDA error {status})")
    return cuda_version(version.value), why if status else count.value


def probe_gpus(cupy: Any, devices: Iterable[int] | None = None) -> list[Gpu]:
    """The GPUs in ``devices``, or all that CuPy finds."""
    indices = range(cupy.cuda.runtime.getDeviceCount()) if devices is None else devices
    return [_gpu(cupy, index) for index in indices]


def _gpu(cupy: Any, index: int) -> Gpu:
    properties = cupy.cuda.runtime.getDeviceProperties(index)
    device = cupy.cuda.Device(index)
    return Gpu(
        index=index,
        name=properties["name"].decode(),
        compute_capability=f"{properties['major']}.{properties['minor']}",
        multiprocessors=properties["multiProcessorCount"],
        l2_bytes=properties["l2CacheSize"],
        memory_bytes=properties["totalGlobalMem"],
        free_bytes=attempt(lambda: int(device.mem_info[0])),
        pci_bus_id=device.pci_bus_id,
        clocks_mhz=attempt(lambda: _clocks_mhz(device.pci_bus_id)),
    )


def probe_cache(variables: Mapping[str, str]) -> Cache:
    """Look at the folder that CuPy takes under these environment variables; nothing is left behind there."""
    default = os.path.expanduser("~/.cupy/kernel_cache")  # noqa: PTH111 - as CuPy does; Path's raises without a home
    name = variables.get("CUPY_CACHE_DIR", default)
    if not name:
        return Cache("", False, Unavailable("CUPY_CACHE_DIR is set, but empty"), 0)
    folder = Path(name)
    exists = attempt(folder.is_dir) is True
    size = attempt(lambda: sum(file.stat().st_size for file in folder.iterdir())) if exists else 0
    return Cache(name, exists, attempt(lambda: _write_to(folder)), size)


def _write_to(folder: Path) -> bool:
    """Return True or raise OSError. Permission bits know nothing of read-only file systems and quotas, so try."""
    place = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"kernel")
    except OSError as error:
        raise OSError(f"{place}: {error.strerror}") from error
    return True


def _cuda_headers() -> str:
    """CuPy asks the same function, and without an answer compiles not even a kernel that includes nothing."""
    from cuda import pathfinder

    folder = pathfinder.find_nvidia_header_directory("cudart")
    if folder is None:
        raise FileNotFoundError("not found")
    return str(folder)


def _headers_version(folder: Path) -> str:
    text = (folder / "cuda_runtime_api.h").read_text(encoding="utf-8", errors="replace")
    found = re.search(r"^#define CUDART_VERSION +(\d+)", text, re.MULTILINE)
    if found is None:
        raise ValueError("cuda_runtime_api.h does not say")
    return cuda_version(int(found[1]))


def _temporary_folder() -> str:
    """As tempfile chooses it, if a name in it can be handed to the compiler: CuPy spells names in UTF-8."""
    folder = tempfile.gettempdir()
    try:
        folder.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{folder!r} has no spelling in UTF-8") from None
    _write_to(Path(folder))
    return folder


def probe_compiled_ahead() -> CompiledAhead:
    """Look at every file of the folder; what is not named like a kernel of ours is none of ours."""
    place = cubins.folder()
    kernels, outdated, damaged = Counter[str](), 0, {}
    current = attempt(lambda: {sources.digest(name) for name in sources.kernel_names()})
    digests = set() if isinstance(current, Unavailable) else current
    exists = attempt(place.is_dir) is True
    found = attempt(lambda: sorted(place.glob("*.cubin"))) if exists else []
    for path in [] if isinstance(found, Unavailable) else found:
        complaint, named = cubins.damage(path), cubins.parse(path)
        if complaint or named is None:
            damaged[path.name] = complaint
        elif named.source in digests:
            kernels[named.arch] += 1
        else:
            outdated += 1
    named_by_variable = bool(os.environ.get(cubins.VARIABLE))
    return CompiledAhead(str(place), named_by_variable, exists, dict(kernels), outdated, damaged)


@contextmanager
def _management_library() -> Iterator[Any]:
    import pynvml

    pynvml.nvmlInit()
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _driver_release() -> str:
    with _management_library() as nvml:
        return str(nvml.nvmlSystemGetDriverVersion())


def _clocks_mhz(pci_bus_id: str) -> dict[str, int]:
    with _management_library() as nvml:
        gpu = nvml.nvmlDeviceGetHandleByPciBusId(pci_bus_id)
        return {
            "multiprocessors": nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
            "multiprocessors_max": nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM),
            "memory": nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM),
            "memory_max": nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_MEM),
        }


def _package_version() -> str:
    from kda_cupy import __version__

    return __version__


def _git(*arguments: str) -> str:
    if not (CHECKOUT / ".git").exists():
        raise FileNotFoundError("not a clone")
    if shutil.which("git") is None:
        raise FileNotFoundError("git is not installed")
    command = ["git", "--no-optional-locks", "-C", str(CHECKOUT), *arguments]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    if run.returncode:
        raise OSError(run.stderr)
    return run.stdout.strip()


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.+)$", info.read_text(), re.MULTILINE) if info.exists() else None
    return found[1] if found else platform.processor() or platform.machine()
