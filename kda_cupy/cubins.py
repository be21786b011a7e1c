# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled ahead of time: a folder of files that can be copied to other machines.

``kda-cupy warmup`` writes it; :mod:`kda_cupy.modules` looks there before it has anything compiled. The name of a
file says what it holds:

    packed_decode.sm_90.<source>.<options>.<content>.cubin

the kernel, the GPU it is for, and digests of the flattened source, of the compiler's options, and of the file itself.
So a kernel made from another version's source, for another GPU or with other options is not found; a file that was cut
short or changed is not loaded; and any number of processes may write to one folder, since equal names mean equal files.

The only folder looked at is the one that ``KDA_CUPY_CUBINS`` names, or else ``cubins`` inside the package. The digest
tells damage, not malice: who may write there decides what runs on the GPU, as with the package's own files. So a folder
or a file that every user of the machine may write to is passed over.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kda_cupy import sources
from kda_cupy.config import OPTIONS, KernelConfig

VARIABLE: Final = "KDA_CUPY_CUBINS"
PACKAGED: Final = Path(__file__).parent / "cubins"
"""Looked at unless the variable is set."""

MOST_BYTES: Final = 64 << 20
"""Of one file; kernels have some 20 kB."""

_NAME: Final = re.compile(r"(\w+)\.(sm_\w+)\.([0-9a-f]{16})\.([0-9a-f]{16})\.([0-9a-f]{32})\.cubin")
_ELF_MAGIC: Final = b"\x7fELF"
_MACHINE: Final = slice(18, 20)
_CUDA_MACHINE: Final = (190).to_bytes(2, "little")


@dataclass(frozen=True, slots=True)
class Cubin:
    """What the name of a file says. The digests are hexadecimal."""

    path: Path
    entry: str
    arch: str
    source: str
    options: str
    content: str


def folder() -> Path:
    """Where kernels compiled ahead are looked for."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else PACKAGED


def stem(config: KernelConfig, arch: str) -> str:
    """The name of a kernel's file up to the digest of its content; ``arch`` is such as ``"sm_90"``."""
    options = hashlib.sha256("\0".join((*OPTIONS, *config.defines())).encode()).hexdigest()[:16]
    return f"{config.entry}.{arch}.{sources.digest(config.source)}.{options}"


def find(config: KernelConfig, arch: str) -> Path | None:
    """A whole file with this very kernel, or None. Warns of a damaged one, and of a named folder that is missing."""
    place = folder()
    if not place.is_dir():
        if os.environ.get(VARIABLE):
            warnings.warn(
                f"{VARIABLE} names {place}, where there is no folder, so kernels are compiled here. "
                f"Make it with `kda-cupy warmup`, or unset the variable.",
                RuntimeWarning,
                stacklevel=2,
            )
        return None
    if anybody_may_write(place.stat()):
        warnings.warn(
            f"{place} is not used, for every user of this machine may write to it and what is in it runs on the GPU, "
            f"so kernels are compiled here. chmod o-w {place}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    for path in sorted(place.glob(f"{stem(config, arch)}.*.cubin")):
        complaint = damage(path)
        if not complaint:
            return path
        warn_of(path, complaint)
    return None


def anybody_may_write(status: os.stat_result) -> bool:
    """True where the system knows such permissions and they are given to everybody."""
    return os.name == "posix" and bool(status.st_mode & stat.S_IWOTH)


def warn_of(path: Path, complaint: str) -> None:
    """Say why a file is not used, and that the kernel is compiled instead."""
    warnings.warn(
        f"{path} is not used, for {complaint}; the kernel is compiled here. Make the file anew with `kda-cupy warmup`.",
        RuntimeWarning,
        stacklevel=3,
    )


def damage(path: Path) -> str:
    """Why a file is no whole kernel of ours, or an empty string."""
    named = parse(path)
    if named is None:
        return "its name is not one that kda-cupy gives"
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > MOST_BYTES:  # a pipe would make us wait
            return "it is no file of a kernel's size"
        if anybody_may_write(status):
            return "every user of this machine may write to it"
        code = path.read_bytes()
    except OSError as cause:
        return f"it cannot be read ({cause.strerror})"
    if code[:4] != _ELF_MAGIC or code[_MACHINE] != _CUDA_MACHINE:
        return "it holds no machine code for an NVIDIA GPU"
    if _content_digest(code) != named.content:
        return "it was cut short or changed"
    return ""


def parse(path: Path) -> Cubin | None:
    """What the name of a file says, or None if it is not one of ours."""
    match = _NAME.fullmatch(path.name)
    return Cubin(path, *match.groups()) if match else None


def store(config: KernelConfig, arch: str, code: bytes, place: Path) -> Path:
    """Write a kernel into a folder, whole or not at all. Raises OSError."""
    place.mkdir(parents=True, exist_ok=True)
    path = place / f"{stem(config, arch)}.{_content_digest(code)}.cubin"
    handle, temporary = tempfile.mkstemp(dir=place, prefix=".", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(code)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)  # mkstemp's files are for their owner only, and these are shipped
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def _content_digest(code: bytes) -> str:
    return hashlib.sha256(code).hexdigest()[:32]
