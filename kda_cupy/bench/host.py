# SPDX-License-Identifier: Apache-2.0
"""``kda-cupy bench host``: what a call costs the CPU before the GPU begins, for CuPy and for torch operands.

At small batches a decode kernel is done sooner than Python is, so this is what a server waits for. Three numbers a
row, none of which waits for the GPU: the bridge alone (every operand becomes a CuPy view, streams are ordered, the
operands are kept alive), a bound call (only launches), and an eager call (bridge, checks, parameters, launch).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from kda_cupy import bridge
from kda_cupy.bench.cases import PRESETS, Case, random_array
from kda_cupy.dtypes import BFLOAT16, by_name
from kda_cupy.gpu import require_gpu
from kda_cupy.launch import bind
from kda_cupy.ops import commit, mtp_verify, packed_decode
from kda_cupy.ops.mtp_checks import DIM

DEFAULT_PRESET: Final = "kimi-k3-tp8"
TOKENS: Final = 4
"""Of a request in verify."""
CALLS: Final = 20
"""Between two waits: few enough for the queue not to fill up."""

Operands = dict[str, Any]
_WRITTEN: Final[dict[str, frozenset[str]]] = {
    **dict.fromkeys((packed_decode.KDA, packed_decode.GDN), frozenset(packed_decode.WRITTEN)),
    mtp_verify.NAME: mtp_verify.WRITTEN,
    commit.NAME: commit.WRITTEN,
}


@dataclass(frozen=True, slots=True)
class HostRow:
    """Medians, in microseconds, of one operation on one library's arrays."""

    operation: str
    arrays: str
    """``"CuPy"`` or ``"torch"``."""
    operands: int
    """How many arrays."""
    bridge_us: float
    bound_us: float
    eager_us: float


def measure_host(case: Case, device: int = 0, samples: int = 15) -> list[HostRow]:
    """Time every operation that knows the case, on CuPy arrays and, where torch sees the GPU, on its tensors.

    case: B rows, or B requests of ``TOKENS`` tokens in verify and commit. Raises NoGpuError.
    """
    cupy = require_gpu()
    libraries: dict[str, Callable[[Any], Any]] = {"CuPy": cupy.asarray}
    torch = _torch()
    if torch is not None:
        libraries["torch"] = lambda array: _to_torch(torch, array, device)
    rows = []
    with cupy.cuda.Device(device) as here:
        for operation, operands in _problems(case):
            for name, to_library in libraries.items():
                arrays = {
                    key: to_library(value) if isinstance(value, np.ndarray) else value
                    for key, value in operands.items()
                }
                rows.append(_measure(name, operation, arrays, here, samples))
    return rows


def _measure(
    library: str, operation: Callable[..., Any], operands: Operands, here: Any, samples: int
) -> HostRow:
    arrays = {name: value for name, value in operands.items() if not isinstance(value, float | None)}
    written = _WRITTEN[operation.__name__]
    bound = bind(operation, **operands)

    def median_us(call: Callable[[], Any]) -> float:
        call()
        times = []
        for _ in range(samples):
            here.synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            times.append((time.perf_counter() - start) / CALLS * 1e6)
        here.synchronize()
        return float(np.median(times))

    return HostRow(
        operation=operation.__name__,
        arrays=library,
        operands=len(arrays),
        bridge_us=median_us(lambda: _cross(arrays, written, here.id)),
        bound_us=median_us(bound),
        eager_us=median_us(lambda: operation(**operands)),
    )


def _cross(arrays: Mapping[str, Any], written: frozenset[str], device: int) -> None:
    """What an operation does with the operands it is given, apart from the operation."""
    if not bridge.all_native(arrays.values()):
        bridge.after_launch(device, bridge.adopt_all(arrays, written))


def _torch() -> Any:
    """The module, if it is there and sees a GPU."""
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def _to_torch(torch: Any, array: Any, device: int) -> Any:
    """A copy on the GPU; bfloat16 goes as bits, for NumPy hands it to nobody."""
    bits = array.view(np.int16) if array.dtype == BFLOAT16 else array
    tensor = torch.from_numpy(np.ascontiguousarray(bits)).to(f"cuda:{device}")
    return tensor.view(torch.bfloat16) if array.dtype == BFLOAT16 else tensor


def _problems(case: Case) -> list[tuple[Callable[..., Any], Operands]]:
    """The operations that know a case, with operands for them as NumPy arrays."""
    rng = np.random.default_rng(0)
    slots = 1 + np.arange(case.B, dtype=np.int32)
    state = np.zeros((case.B + 1, case.HV, case.V, case.K), np.float32)
    decode = packed_decode.kda_packed_decode if case.op == "kda" else packed_decode.gdn_packed_decode
    found: list[tuple[Callable[..., Any], Operands]] = [(decode, _decode_operands(case, state, slots, rng))]
    if case.op == "kda" and case.K == case.V == DIM:
        verify = _verify_operands(case, state, slots, rng)
        found += [
            (mtp_verify.kda_decode_mtp, verify),
            (commit.kda_commit, _commit_operands(case, verify)),
        ]
    return found


def _decode_operands(case: Case, state: Any, slots: Any, rng: np.random.Generator) -> Operands:
    kind, gates = by_name(case.dtype), case.HV * case.K if case.op == "kda" else case.HV
    width = 2 * case.H * case.K + case.HV * case.V
    return {
        "mixed_qkv": random_array(rng, (case.B, width)).astype(kind),
        "a": random_array(rng, (case.B, gates)).astype(kind),
        "b": random_array(rng, (case.B, case.HV)).astype(kind),
        "A_log": rng.uniform(-2, 1, case.HV).astype(np.float32),
        "dt_bias": random_array(rng, (gates,)),
        "initial_state": state,
        "ssm_state_indices": slots,
        "out": np.zeros((case.B, 1, case.HV, case.V), kind),
        "lower_bound": case.lower_bound,
    }


def _verify_operands(case: Case, state: Any, slots: Any, rng: np.random.Generator) -> Operands:
    """B requests of TOKENS tokens, rings, conv history and windows, an output norm: as many operands as can be."""
    H, HV, B, T, P = case.H, case.HV, case.B, case.B * TOKENS, len(state)
    kind = by_name(case.dtype)

    def drawn(*shape: int) -> Any:
        return random_array(rng, shape).astype(kind)

    heads = {"q": H, "k": H, "v": HV}
    operands: Operands = {}
    for letter, count in heads.items():
        operands |= {
            f"x_{letter}": drawn(1, T, count, DIM),
            f"w_{letter}": random_array(rng, (count * DIM, 4)),
            f"cs_{letter}": drawn(P, count * DIM, 3),
            f"intermediate_conv_{letter}": drawn(B, TOKENS, count * DIM, 3),
        }
    return operands | {
        "g": drawn(1, T, HV, DIM),
        "beta": drawn(1, T, HV),
        "A_log": rng.uniform(-2, 1, HV).astype(np.float32),
        "dt_bias": random_array(rng, (HV * DIM,)),
        "recurrent_state": state,
        "ssm_state_indices": slots,
        "cu_seqlens": np.arange(0, T + 1, TOKENS, dtype=np.int32),
        "intermediate_state_indices": np.arange(B, dtype=np.int32),
        "replayssm_rawv": drawn(P, HV, TOKENS, DIM),
        "replayssm_rawk": drawn(P, H, TOKENS, DIM),
        "replayssm_g": random_array(rng, (P, HV, TOKENS, DIM)),
        "replayssm_beta": random_array(rng, (P, HV, TOKENS)),
        "onorm_gate": drawn(1, T, HV, DIM),
        "onorm_weight": random_array(rng, (DIM,)),
        "onorm_eps": 1e-5,
        "out": np.zeros((1, T, HV, DIM), kind),
        "lower_bound": case.lower_bound,
    }


def _commit_operands(case: Case, verify: Operands) -> Operands:
    shared = ("recurrent_state", "ssm_state_indices", "intermediate_state_indices")
    arrays = {name: verify[name] for name in shared}
    arrays |= {
        name: value
        for name, value in verify.items()
        if name.startswith(("replayssm_", "cs_", "intermediate_conv_"))
    }
    return arrays | {"accept_lens": np.ones(case.B, np.int32)}


def render_host(rows: list[HostRow]) -> Table:
    """Microseconds, three significant digits."""
    table = Table(box=None, pad_edge=False)
    for heading, justify in (("operation", "left"), ("arrays", "left"), ("operands", "right")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for heading in ("bridge", "bound call", "eager call"):
        table.add_column(f"{heading} us", justify="right")
    for row in rows:
        times = (f"{each:.3g}" for each in (row.bridge_us, row.bound_us, row.eager_us))
        table.add_row(row.operation, row.arrays, str(row.operands), *times)
    return table


@click.command(
    short_help="Time what a call costs the CPU.",
    epilog="\b\nExamples:\n  kda-cupy bench host\n  kda-cupy bench host --preset qwen3-next --batch 64 --json",
)
@click.option(
    "--preset",
    type=click.Choice(list(PRESETS)),
    metavar="NAME",
    default=DEFAULT_PRESET,
    show_default=True,
    help=f"A model's heads, dims and gate: {', '.join(PRESETS)}.",
)
@click.option("--batch", "B", type=click.IntRange(1, 1024), default=8, show_default=True, help="Rows.")
@click.option("--device", type=click.IntRange(min=0), default=0, show_default=True, help="Number of the GPU.")
@click.option(
    "--repeats", type=click.IntRange(min=1), default=15, show_default=True, help=f"Samples of {CALLS} calls."
)
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON.")
def host(preset: str, B: int, device: int, repeats: int, as_json: bool) -> None:
    """Time what a call costs the CPU: bridge, bound call, eager call, for CuPy and torch operands."""
    count = require_gpu().cuda.runtime.getDeviceCount()
    if device >= count:
        raise click.BadParameter(f"there is no GPU {device}; CuPy finds {count}", param_hint="--device")
    rows = measure_host(replace(PRESETS[preset], B=B), device, repeats)
    if as_json:
        click.echo(json.dumps([asdict(row) for row in rows], indent=2))
        return
    if not any(row.arrays == "torch" for row in rows):
        click.echo("torch is not installed, or sees no GPU: CuPy only", err=True)
    case = PRESETS[preset]
    Console(file=sys.stdout).print(render_host(rows))
    click.echo(f"{preset}: H={case.H} HV={case.HV} B={B} {case.dtype}; medians of {repeats} x {CALLS} calls")
