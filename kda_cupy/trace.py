# SPDX-License-Identifier: Apache-2.0
"""Traces: tokens that another implementation has answered, and how near an operation of ours comes to its answers.

A trace is an ``.npz`` file of a few requests and a few chained tokens: raw operands, the states before, the outputs
and the states after. ``scripts/record_trace.py`` makes them with flash-linear-attention and says in the metadata how.
"""

from __future__ import annotations

import json
import math
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

from kda_cupy.reference.truth import relative_error

Array = npt.NDArray[np.float32]

SCHEMA: Final = "kda_cupy.trace"
SCHEMA_VERSION: Final = 1
LAYOUT: Final = "[requests, HV, V, K]"
_OPERATIONS: Final = ("kda_packed_decode", "gdn_packed_decode")
_SIZES: Final = ("tokens", "requests", "H", "HV", "K", "V")
MOST_BYTES: Final = 1 << 30
"""Of all arrays of a trace, unpacked: a small archive may unpack to a thousand times its size."""
_UNREADABLE: Final = (
    *(OSError, EOFError, ValueError, KeyError, RuntimeError, zipfile.BadZipFile, zlib.error),
    *(AttributeError, TypeError),  # a plain .npy loads as an array, which is no archive
)
"""What ``np.load`` and ``zipfile`` raise for a file that is cut, foreign, or damaged in a way they notice."""


@dataclass(frozen=True, eq=False)
class Trace:
    """A recorded run. All arrays are float32 NumPy; ``t`` tokens of N requests, one token of each at a time.

    Activations are exact in bfloat16: they may be cast to it without changing the answer.
    """

    mixed_qkv: Array
    """[t, N, 2*H*K + HV*V]: q of all H, k of all H, v of all HV."""
    a: Array
    """[t, N, HV*K] (KDA) or [t, N, HV] (GDN): raw gate."""
    b: Array
    """[t, N, HV]: raw beta logit."""
    A_log: Array
    """[HV]."""
    dt_bias: Array
    """[HV*K] (KDA) or [HV] (GDN)."""
    initial_state: Array
    """[N, HV, V, K]: rows are values V, columns are keys K."""
    out: Array
    """[t, N, HV, V]: the answers."""
    final_state: Array
    """[N, HV, V, K], after the last token."""
    metadata: dict[str, Any]
    """Everything the file says about itself; ``metadata["origin"]`` tells what made it."""

    @property
    def operation(self) -> str:
        """``"kda_packed_decode"`` or ``"gdn_packed_decode"``."""
        return str(self.metadata["operation"])

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments with which the operation means what the recorded one did."""
        return {
            "scale": self.metadata["scale"],
            "lower_bound": self.metadata["lower_bound"],
            "use_qk_l2norm_in_kernel": self.metadata["use_qk_l2norm"],
            "allow_neg_eigval": self.metadata["allow_neg_eigval"],
        }


def load_trace(path: str | Path) -> Trace:
    """Read a trace; nothing in the file is executed.

    Raises OSError if the file cannot be opened, and ValueError, which names the file and what is wrong with it, if it
    is no trace, is cut or damaged, has another schema version, or if its arrays do not fit its metadata.
    """
    with Path(path).open("rb") as file:
        try:
            _check_sizes(file)
            with np.load(file, allow_pickle=False) as archive:
                contents = {name: archive[name] for name in archive.files}
        except _UNREADABLE as cause:
            raise _bad(path, "is no .npz archive, or is cut or damaged") from cause
    metadata = _read_metadata(path, contents.pop("metadata", None))
    shapes = _shapes(metadata)
    if contents.keys() != shapes.keys():
        raise _bad(path, f"holds the arrays {sorted(contents)}, a trace holds {sorted(shapes)}")
    for name, shape in shapes.items():
        array = contents[name]
        if array.dtype != np.float32 or array.shape != shape:
            raise _bad(
                path, f"{name} is {array.dtype} {list(array.shape)}, its metadata wants float32 {list(shape)}"
            )
    return Trace(**contents, metadata=metadata)


def _check_sizes(file: BinaryIO) -> None:
    """Raise ValueError unless each array takes the bytes that its header says, before anybody allocates by a header."""
    with zipfile.ZipFile(file) as archive:
        if sum(member.file_size for member in archive.infolist()) > MOST_BYTES:
            raise ValueError("more bytes than a trace has")
        for member in archive.infolist():
            with archive.open(member) as array:
                version = np.lib.format.read_magic(array)
                read = (
                    np.lib.format.read_array_header_1_0
                    if version == (1, 0)
                    else np.lib.format.read_array_header_2_0
                )
                shape, _, dtype = read(array)
                if array.tell() + math.prod(shape) * dtype.itemsize != member.file_size:
                    raise ValueError("an array of another size than its header says")
    file.seek(0)


def _bad(path: str | Path, problem: str) -> ValueError:
    return ValueError(f"{path}: {problem}; scripts/record_trace.py makes traces that this version reads")


def _read_metadata(path: str | Path, stored: Any) -> dict[str, Any]:
    try:
        metadata = json.loads(stored.tobytes())
        schema, schema_version = metadata["schema"], metadata["schema_version"]
    except (AttributeError, ValueError, KeyError, TypeError) as cause:
        raise _bad(path, "has no readable metadata, so it is no trace") from cause
    if schema != SCHEMA or schema_version != SCHEMA_VERSION:
        raise _bad(path, f"is {schema} version {schema_version}, wanted {SCHEMA} version {SCHEMA_VERSION}")
    wrong = [name for name, is_right in _rules(metadata).items() if not is_right]
    if wrong:
        raise _bad(path, "metadata: " + ", ".join(f"{name} = {metadata.get(name)!r}" for name in wrong))
    return metadata  # type: ignore[no-any-return]


def _rules(metadata: dict[str, Any]) -> dict[str, bool]:
    """For each field that :func:`replay` relies on, whether it can be relied on."""
    get: Callable[..., Any] = metadata.get
    sizes = {name: type(get(name)) is int and get(name) > 0 for name in _SIZES}
    bounded = isinstance(get("lower_bound"), float) and -np.inf < get("lower_bound") < 0
    return sizes | {
        "HV": sizes["HV"] and sizes["H"] and get("HV") % get("H") == 0,
        "operation": get("operation") in _OPERATIONS,
        "lower_bound": bounded or get("lower_bound", 0) is None,
        "gate": get("gate") == ("bounded" if bounded else "softplus"),
        "scale": isinstance(get("scale"), float) and bool(np.isfinite(get("scale"))),
        "use_qk_l2norm": isinstance(get("use_qk_l2norm"), bool),
        "allow_neg_eigval": isinstance(get("allow_neg_eigval"), bool),
        "layout": get("layout") == LAYOUT,
        "origin": isinstance(get("origin"), dict),
    }


def _shapes(metadata: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    t, N, H, HV, K, V = (metadata[name] for name in _SIZES)
    gates = HV * K if metadata["operation"] == "kda_packed_decode" else HV
    return {
        "mixed_qkv": (t, N, 2 * H * K + HV * V),
        "a": (t, N, gates),
        "b": (t, N, HV),
        "A_log": (HV,),
        "dt_bias": (gates,),
        "initial_state": (N, HV, V, K),
        "out": (t, N, HV, V),
        "final_state": (N, HV, V, K),
    }


@dataclass(frozen=True)
class ReplayReport:
    """How near a replay came: ``norm(got - recorded) / norm(recorded)``, NaN if anything was NaN."""

    output_errors: tuple[float, ...]
    """One per token, over all its requests."""
    state_error: float
    """After the last token."""

    @property
    def output_error(self) -> float:
        """The worst token's; NaN if one is NaN."""
        return float(np.max(self.output_errors))

    def within(self, output: float, state: float) -> bool:
        """Whether no error is above its bound. NaN never is within one."""
        return self.output_error <= output and self.state_error <= state


def replay(
    trace: Trace,
    operation: Callable[..., tuple[Any, Any]],
    *,
    activations: npt.DTypeLike = np.float32,
    place: Callable[[npt.NDArray[Any]], Any] = np.asarray,
    fetch: Callable[[Any], npt.NDArray[Any]] = np.asarray,
) -> ReplayReport:
    """Run every token of a trace through an operation, the state handed on from token to token.

    operation: has the signature of ``kda_packed_decode`` and returns (out [N, 1, HV, V], state [P, HV, V, K]).
    activations: dtype of ``mixed_qkv``, ``a`` and ``b``. place: NumPy array to the operation's own (``cupy.asarray``).
    fetch: the way back (``cupy.asnumpy``). The requests sit in a pool of N + 1 slots in reverse order, slot 0 empty, so
    that a row is never its own slot. Whatever the operation raises passes through.
    """
    slots = np.arange(len(trace.initial_state), 0, -1)
    pool = np.zeros((len(slots) + 1, *trace.initial_state.shape[1:]), np.float32)
    pool[slots] = trace.initial_state
    state, placed_slots, A_log, dt_bias = map(place, (pool, slots, trace.A_log, trace.dt_bias))
    errors = []
    for wanted, *token in zip(trace.out, trace.mixed_qkv, trace.a, trace.b, strict=True):
        mixed_qkv, a, b = (place(operand.astype(activations)) for operand in token)
        out, state = operation(mixed_qkv, a, b, A_log, dt_bias, state, placed_slots, **trace.options)
        errors.append(_relative_error(fetch(out)[:, 0], wanted))
    return ReplayReport(tuple(errors), _relative_error(fetch(state)[slots], trace.final_state))


def _relative_error(got: npt.NDArray[Any], recorded: Array) -> float:
    if got.shape != recorded.shape:
        raise ValueError(
            f"the operation answered with shape {list(got.shape)}, recorded is {list(recorded.shape)}"
        )
    return relative_error(got, recorded)
