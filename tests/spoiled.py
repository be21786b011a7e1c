# SPDX-License-Identifier: Apache-2.0
"""Calls with one operand spoiled: each is refused with a page of the catalogue and changes nothing, or it is right.

>>> spoil(calls=1000, seed=0, library=numpy)
Counter({("refused", "dtype"): 143, ...})

A call is made from a valid one. Every array lies in a Buffer of its own, so that "changes nothing" means every byte,
those between and around the arrays too; "right" means what tests/aftermath.py says.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
from aftermath import AFTER, LETTERS, RINGS, differences, faulty_rows
from conv_contract import make_conv, pieces_of
from fake_cupy import on_gpu
from guarded import Buffer, address_of
from mtp_problems import commit_operands, make_mtp
from problems import make_problem, np_dtype, out_shape, to_host
from step_problems import make_step, out_of

import kda_cupy
from kda_cupy.catalogue import CATALOGUE
from kda_cupy.errors import KdaError
from kda_cupy.ops import commit, gdn_step, kda_step, mtp_verify, packed_decode

Operands = dict[str, Any]

OPERATIONS: dict[str, Callable[..., Any]] = {name: getattr(kda_cupy, name) for name in AFTER}
WRITTEN = {
    "kda_packed_decode": frozenset(packed_decode.WRITTEN),
    "gdn_packed_decode": frozenset(packed_decode.WRITTEN),
    "kda_decode_step": kda_step.WRITTEN,
    "gdn_decode_step": gdn_step.WRITTEN,
    "kda_decode_mtp": mtp_verify.WRITTEN,
    "kda_commit": commit.WRITTEN,
}
INDICES = ("indices", "accept_lens", "cu_seqlens", "track_steps")
DTYPES = (
    *("float16", "bfloat16", "float32", "float64", "bool", "complex64"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 17, 0.5, -5.0, -1e-60, 1e39, float("nan"), float("inf"), 1 + 2j),
    *(
        "",
        "full",
        "Full",
        "silu",
        "0",
        b"x",
        [1],
        (),
        np.float16(0.5),
        np.int64(3),
        np.array(0.25),
        np.ones(1),
    ),
    *(np.bool_(True), object()),
)


class Finding(AssertionError):
    """A call that was neither refused as it should be nor right."""


@dataclass
class Call:
    """One call in a library's arrays. ``arguments`` are flat: x[0] and x[1] stand for the tuple x."""

    operation: str
    arguments: Operands
    library: ModuleType
    bound: bool = False
    buffers: dict[str, Buffer] = field(default_factory=dict)
    story: str = "as it is"
    must_refuse: bool = False
    blames: str = ""
    """What the message has to name."""
    python_error: bool = False
    """Python itself refuses: a TypeError without a code."""

    def place(self, name: str, value: Any, offset: int = 0) -> None:
        """Give an operand memory of its own."""
        self.buffers[name] = Buffer(value, self.library, offset)
        self.arguments[name] = self.buffers[name].array

    def keywords(self) -> Operands:
        """The arguments as the operation takes them."""
        grouped: Operands = {}
        for name, value in self.arguments.items():
            if "[" in name:
                grouped.setdefault(name.partition("[")[0], []).append(value)
            else:
                grouped[name] = value
        return {name: tuple(value) if isinstance(value, list) and f"{name}[0]" in self.arguments else value
                for name, value in grouped.items()}  # fmt: skip

    def is_written(self, name: str) -> bool:
        """True if the operation may write to the operand."""
        kind = name.partition("[")[0]
        if self.operation != "causal_conv1d_update":
            return kind in WRITTEN[self.operation]
        windows = any(each.startswith("intermediate_conv_window") for each in self.arguments)
        return kind in ("out", "intermediate_conv_window" if windows else "conv_state")

    def arrays(self) -> list[str]:
        """Operands that are arrays."""
        return [name for name in self.arguments if name in self.buffers]


# ---- valid calls ------------------------------------------------------------------------------------------------


@lru_cache(maxsize=200)
def base(operation: str, variant: int, seed: int, dtype: str) -> Operands:
    """A valid call's operands in NumPy. A variant is a kernel on CUDA, so there are few."""
    rng = np.random.default_rng(seed)
    odd = bool(variant % 2)
    index_dtype = ("int32", "int64")[odd]
    lower_bound = (-5.0, None)[odd]
    if operation.endswith("packed_decode"):
        K, V = ((128, 128), (36, 20), (4, 3), (64, 24))[variant % 4]
        problem = make_problem(operation[:3], B=3, H=1 + odd, HV=2, K=K, V=V, dtype=dtype, lower_bound=lower_bound,
                               row_padding=(0, 8, 3)[variant % 3], index_dtype=index_dtype, seed=seed)  # fmt: skip
        return problem | {"out": np.full(out_shape(problem), np.nan, problem["mixed_qkv"].dtype)}
    if operation.endswith("decode_step"):
        problem = make_step(operation[:3], B=2, H=1, HV=1 + odd, dtype=dtype, lower_bound=lower_bound, bias=not odd,
                            onorm=variant % 3 == 0, index_dtype=index_dtype, channels_fastest=variant % 4 != 3,
                            seed=seed)  # fmt: skip
        return problem | {"out": out_of(problem)}
    if operation == "causal_conv1d_update":
        return _conv(variant, seed, dtype, index_dtype)
    mode = ("rings", "snapshots")[variant // 2 % 2]
    problem = make_mtp(N=2, t=2, H=1, HV=1 + odd, dtype=dtype, mode=mode, lower_bound=lower_bound, bias=not odd,
                       onorm=variant % 3 == 0, index_dtype=index_dtype, ring_indices=variant % 4 == 0,
                       lengths=[2, 1] if odd else None, spare_tokens=odd, seed=seed)  # fmt: skip
    if operation == "kda_decode_mtp":
        shape = (1, *problem["x_v"].shape[1:])
        return problem | {"out": np.full(shape, np.nan, problem["x_v"].dtype)}
    for name in ("intermediate_ssm", *RINGS, *(f"intermediate_conv_{letter}" for letter in LETTERS)):
        if name in problem:
            drawn = rng.standard_normal(problem[name].shape, np.float32)
            problem[name][...] = -np.abs(drawn) if name == RINGS[2] else drawn
    operands = commit_operands(problem, rng.integers(0, 3, 2), conv=variant % 3 != 1)
    if not any(name in operands for name in ("intermediate_ssm", "cs_q")):
        del operands["intermediate_state_indices"]
    if variant % 4 == 1:
        idle = np.setdiff1d(np.arange(1, len(operands["recurrent_state"])), operands["ssm_state_indices"])
        operands |= {
            "track_indices": idle[:2].astype(index_dtype),
            "track_steps": np.array([0, -1], index_dtype),
        }
        operands["accept_lens"][0] = 2
    if variant % 5 == 0:
        flat = {name: value for name, value in operands.items() if value.ndim > 1}
        operands |= {name: np.stack([value, value]) for name, value in flat.items()}
    return operands


def _conv(variant: int, seed: int, dtype: str, index_dtype: str) -> Operands:
    pieces = ((70,), (128, 5), (5, 1, 128))[variant % 3]
    problem = make_conv(B=2, pieces=pieces, t=(None, 2)[variant // 2 % 2], width=2 + variant % 3, dtype=dtype,
                        bias=variant % 4 != 3, windows=variant % 4 > 1, activation=("silu", None)[variant % 2],
                        index_dtype=index_dtype, seed=seed)  # fmt: skip
    x = pieces_of(problem["x"])
    shape = (len(x[0]), sum(each.shape[1] for each in x), *x[0].shape[2:])
    problem["out"] = np.full(shape, np.nan, x[0].dtype)
    flat: Operands = {}
    for name, value in problem.items():
        parts = value if isinstance(value, tuple) else ()
        flat |= {f"{name}[{number}]": part for number, part in enumerate(parts)} or {name: value}
    return flat


VARIANTS = 12


def place(operation: str, operands: Operands, library: ModuleType) -> Call:
    """The call in a library's arrays."""
    call = Call(operation, {}, library)
    for name, value in operands.items():
        if isinstance(value, np.ndarray):
            call.place(name, value)
        else:
            call.arguments[name] = value
    return call


# ---- ways to spoil one ------------------------------------------------------------------------------------------
# Each takes a call, the operand's name, its NumPy values and a generator, changes the call, and returns in words what
# it did, or "" if it does not apply.


def rank(call: Call, name: str, value: Any, rng: np.random.Generator) -> str:
    array = call.arguments[name]
    ways = {"an axis of 1 in front": array[None], "an axis of 1 behind": array[..., None]}
    if array.ndim and array.shape[0]:
        ways["the first axis gone"] = array[0, ...]
    if value.ndim > 1 and value.size:
        ways["two axes made one"] = array.reshape(-1, *array.shape[2:])
    if value.ndim and value.size and value.shape[-1] % 2 == 0 and value.strides[-1] == value.itemsize:
        ways["the last axis in two"] = array.reshape(*array.shape[:-1], 2, -1)
    way = str(rng.choice(list(ways)))
    changed = ways[way]
    if call.buffers[name].holds(changed):
        call.arguments[name] = changed
    else:  # it had to be copied
        call.place(name, to_host(changed))
    return way


def axis(call: Call, name: str, value: Any, rng: np.random.Generator) -> str:
    if not value.ndim:
        return ""
    n = int(rng.integers(value.ndim))
    way = str(rng.choice(["one less", "one more", "none", "one", "twice"]))
    length = {"one less": value.shape[n] - 1, "none": 0, "one": 1}.get(way)
    if length is None:
        again = np.take(value, [0], n) if way == "one more" else value
        call.place(name, np.concatenate([value, again], n))
    elif length < 0 or length == value.shape[n]:
        return ""
    else:
        call.arguments[name] = call.arguments[name][(slice(None),) * n + (slice(0, length),)]
    return f"axis {n}: {way}"


def dtype(call: Call, name: str, value: Any, rng: np.random.Generator) -> str:
    chosen = str(rng.choice([*DTYPES, *([">f4", ">i4"] if call.library is np else [])]))
    if np_dtype(chosen) == value.dtype or (name == "conv_weight" and not _is_exact(call)):
        return ""
    with np.errstate(all="ignore"):
        call.place(name, value.astype(np_dtype(chosen)))
    return chosen


def stride(call: Call, name: str, value: Any, rng: np.random.Generator) -> str:
    if not value.ndim:
        return ""
    n = int(rng.integers(value.ndim))
    way = str(rng.choice(["doubled", "zero", "negative", "swapped", "one element longer"]))
    whole = (slice(None),) * n
    if way == "doubled":
        wide = np.full((*value.shape[:n], 2 * value.shape[n], *value.shape[n + 1 :]), 7, value.dtype)
        wide[(*whole, slice(None, None, 2))] = value
        call.place(name, wide[(*whole, slice(None, None, 2))])
    elif way == "one element longer":
        wide = np.full((*value.shape[:-1], value.shape[-1] + 1), 7, value.dtype)
        wide[..., :-1] = value
        call.place(name, wide[..., :-1])
    elif way == "negative":
        call.arguments[name] = call.arguments[name][(*whole, slice(None, None, -1))]
    elif way == "swapped":
        other = int(rng.integers(value.ndim))
        call.place(name, np.ascontiguousarray(value.swapaxes(n, other)).swapaxes(n, other))
        return f"axes {n} and {other} swapped in memory"
    else:
        if not value.size or not _is_exact(call):
            return ""
        buffer = call.buffers[name]
        strides = [0 if each == n else size for each, size in enumerate(value.strides)]
        start = _offset(buffer, call.arguments[name])
        call.arguments[name] = buffer.view(value.shape, value.dtype, start, tuple(strides))
    return f"axis {n}: {way}"


def alignment(call: Call, name: str, value: Any, rng: np.random.Generator) -> str:
    way = str(rng.choice(["1 byte", "1", "2", "4", "8"]))
    call.place(name, value, 1 if way == "1 byte" else int(way) * value.itemsize)
    return f"{way} past a boundary"


def device(call: Call, name: str, value: Any, rng: np.random.Generator) -> str:
    host = np.array(value)
    call.arguments[name] = on_gpu(host, int(rng.integers(2))) if call.library is np else host
    call.must_refuse, call.blames = len(call.arrays()) > 1, name
    return "elsewhere"


def kind(call: Call, name: str, value: Any, rng: np.random.Generator) -> str:
    others = ([1.0], "text", 1.5, object(), np.float32(1), {}, b"", range(3), value.tolist)
    call.arguments[name] = others[int(rng.integers(len(others)))]
    call.must_refuse, call.blames = True, name.partition("[")[0]
    return f"a {type(call.arguments[name]).__name__}"


def none(call: Call, name: str, value: Any, rng: np.random.Generator) -> str:
    if "bias" in name and not _is_exact(call):
        return ""
    call.arguments[name] = None
    return "None"


def overlap(call: Call, name: str, value: Any, rng: np.random.Generator) -> str:
    """The operand begins where one that is written does."""
    arrays = [
        each for each in call.arrays() if each != name and (call.is_written(each) or call.is_written(name))
    ]
    other = str(rng.choice(arrays))
    start = _offset(call.buffers[other], call.arguments[other])
    info_span = (
        sum((n - 1) * step for n, step in zip(value.shape, value.strides, strict=True)) + value.itemsize
    )
    if (
        start + info_span > len(call.buffers[other].backing)
        or not value.size
        or not call.arguments[other].size
    ):
        return ""
    call.arguments[name] = call.buffers[other].view(value.shape, value.dtype, start, value.strides)
    call.must_refuse = True
    return f"where `{other}` is"


def read_only(call: Call, name: str, value: Any, rng: np.random.Generator) -> str:
    if call.library is not np:
        return ""
    call.arguments[name].flags.writeable = False
    if call.is_written(name):
        call.must_refuse, call.blames = True, name
    return "read-only"


def nan(call: Call, name: str, value: Any, rng: np.random.Generator) -> str:
    if not value.size or value.dtype.kind in "iu" or not _is_exact(call):
        return ""
    changed = call.buffers[name].seen_in(call.buffers[name].before, call.arguments[name])
    changed[tuple(rng.integers(changed.shape))] = np.nan
    call.buffers[name].restore()
    return "one NaN"


def index(call: Call, name: str, value: Any, rng: np.random.Generator) -> str:
    if not name.endswith(INDICES) or not value.size or not _is_exact(call):
        return ""
    limits = np.iinfo(value.dtype)
    wrong = int(
        rng.choice([-1, -7, 0, 1, 2, 3, 4, 5, 6, 17, 99, limits.min, limits.max, 2**31 - 1, -(2**31)])
    )
    changed = call.buffers[name].seen_in(call.buffers[name].before, call.arguments[name])
    changed[int(rng.integers(len(changed)))] = wrong
    call.buffers[name].restore()
    if rng.random() < 0.3:
        call.arguments["validate"] = "full"
    return f"a value of {wrong}"


def option(call: Call, name: str, value: Any, rng: np.random.Generator) -> str:
    """Not of an operand: a host scalar."""
    known = set(inspect.signature(OPERATIONS[call.operation]).parameters)
    arrays = {each.partition("[")[0] for each in call.arrays()}
    scalars = {"scale", "lower_bound", "use_qk_l2norm_in_kernel", "allow_neg_eigval", "null_index", "validate",
               "onorm_eps", "max_tokens_per_request", "activation"} & known - arrays  # fmt: skip
    chosen = str(rng.choice(sorted(scalars)))
    odd = ODD_VALUES[int(rng.integers(len(ODD_VALUES)))]
    if chosen == "activation" and not _is_exact(call):
        return ""
    call.arguments[chosen] = odd
    return f"{chosen}={odd!r}"


def extra(call: Call, name: str, value: Any, rng: np.random.Generator) -> str:
    """An argument that nobody knows, or one that is missing."""
    if rng.random() < 0.5:
        unknown = str(rng.choice(["parent", "scalee", "stream", "cu_seqlen", "state"]))
        call.arguments[unknown] = None
        call.blames = unknown
    else:
        required = [
            each
            for each, parameter in inspect.signature(OPERATIONS[call.operation]).parameters.items()
            if parameter.default is inspect.Parameter.empty
        ]
        call.blames = str(rng.choice(required))
        for each in [each for each in call.arguments if each.partition("[")[0] == call.blames]:
            del call.arguments[each]
    call.python_error = call.must_refuse = True
    return f"the argument {call.blames}"


WAYS: tuple[Callable[..., str], ...] = (
    *(rank, axis, axis, dtype, dtype, stride, stride, alignment, device, kind, none, overlap, overlap),
    *(read_only, nan, nan, index, index, option, option, extra),
)


def _offset(buffer: Buffer, array: Any) -> int:
    return address_of(array) - address_of(buffer.backing)


def _is_exact(call: Call) -> bool:
    """True for fp32 activations: new values then round nothing another way than float64 does."""
    first = next(iter(call.buffers.values())).array
    names = [name for name in ("mixed_qkv", "x_q", "x", "x[0]") if name in call.buffers]
    return (call.buffers[names[0]].array if names else first).dtype in (np.float32, np.int32, np.int64)


# ---- the judge --------------------------------------------------------------------------------------------------


def judge(call: Call) -> str:
    """Make the call. Returns "refused", "recorded" or "right"; raises Finding for anything else.

    "undefined" for what no rule covers: two rows that write to one slot.
    """
    before = {name: np.array(to_host(each)) for name, each in call.arguments.items() if name in call.buffers
              and type(each).__module__.partition(".")[0] == call.library.__name__}  # fmt: skip
    if not call.must_refuse and _is_undefined(call, before):
        return "undefined"
    operation = OPERATIONS[call.operation]
    try:
        prepared = kda_cupy.bind(operation, **call.keywords()) if call.bound else None
        result = operation(**call.keywords()) if prepared is None else prepared()
    except (KdaError, TypeError) as error:
        _judge_refusal(call, error)
        _assert_untouched(call)
        return "refused"
    if call.must_refuse:
        raise Finding(f"{call.story}: not refused")
    return _judge_result(call, before, result)


def _judge_refusal(call: Call, error: Exception) -> None:
    text = str(error)
    if not isinstance(error, KdaError):
        if not call.python_error or call.blames not in text:
            raise Finding(f"{call.story}: {type(error).__name__}: {text}") from error
        return
    page = CATALOGUE.get(error.code)
    if page is None or type(error) is not page.exception:
        raise Finding(f"{call.story}: {type(error).__name__} with the code {error.code!r}") from error
    known = inspect.signature(OPERATIONS[call.operation]).parameters
    if error.operand.partition("[")[0] not in known or error.operand not in text:
        raise Finding(f"{call.story}: a message that names no operand: {text}") from error
    if call.blames and call.blames not in text:
        raise Finding(f"{call.story}: the message is about another operand: {text}") from error


def _assert_untouched(call: Call) -> None:
    for name, buffer in call.buffers.items():
        if changed := buffer.changed(buffer.now()):
            raise Finding(f"{call.story}: refused, and {changed} bytes of `{name}` changed")


def _is_undefined(call: Call, before: Operands) -> bool:
    """Two live rows with one slot, scratch row or ring row, or two requests with the same tokens: a race."""
    if call.arguments.get("validate") == "full":
        return False
    null_index = call.arguments.get("null_index", -1)
    null_index = null_index if type(null_index) is int else -1
    slots = before.get("ssm_state_indices", before.get("conv_state_indices"))
    if slots is None or slots.ndim != 1 or slots.dtype.kind not in "iu":
        return False
    live = slots > max(null_index, -1)
    for name, values in before.items():
        if not name.endswith("indices") or values.shape != slots.shape:
            continue
        if name == "intermediate_state_indices" and call.operation == "kda_commit":
            continue
        chosen = values[live] if name != "track_indices" else values[values > max(null_index, -1)]
        if len(set(chosen.tolist())) < len(chosen):
            return True
    tracked = before.get("track_indices")
    if tracked is not None and set(tracked[tracked >= 0].tolist()) & set(slots[live].tolist()):
        return True
    bounds = before.get("cu_seqlens")
    if bounds is not None and bounds.ndim == 1 and bounds.dtype.kind in "iu":
        spans = sorted(
            (a, b) for a, b in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True) if b > a
        )
        return any(first[1] > second[0] for first, second in pairwise(spans))
    return False


def _judge_result(call: Call, before: Operands, result: Any) -> str:
    scalars = {name: each for name, each in call.arguments.items() if name not in before and each is not None}
    operands = {**before, **scalars}
    if "out" not in operands and call.operation != "kda_commit":
        operands["out"] = to_host(result[0] if isinstance(result, tuple) else result)
    for name in ("null_index", "onorm_eps", "lower_bound", "scale", "max_tokens_per_request"):
        if name in operands:
            operands[name] = np.asarray(operands[name]).item()
    with np.errstate(all="ignore"):
        left = AFTER[call.operation](operands)
    wrong: list[str] = []
    for name, buffer in call.buffers.items():
        memory, each = buffer.now(), left.get(name) if name in before else None
        array = call.arguments.get(name)
        if each is not None and buffer.holds(array):
            wrong += differences(name, buffer.seen_in(memory, array), each)
            changed = buffer.changed(memory, array, each.written)
        else:
            changed = buffer.changed(memory)
        wrong += [f"{changed} bytes of `{name}` changed that nobody may write"] if changed else []
    if "out" in left and "out" not in before:
        wrong += differences("out", to_host(result[0] if isinstance(result, tuple) else result), left["out"])
    recorded = _recorded()
    faults = faulty_rows(operands)
    if bool(recorded) != bool(faults):
        wrong.append(f"{faults} rows out of range, and check_errors says {recorded or 'nothing'}")
    if wrong:
        raise Finding(f"{call.story}: {'; '.join(wrong)}")
    return "recorded" if recorded else "right"


def _recorded() -> str:
    try:
        kda_cupy.check_errors()
    except KdaError as error:
        return str(error)
    return ""


# ---- many of them -----------------------------------------------------------------------------------------------


def make(seed: int, library: ModuleType, variants: int = VARIANTS) -> Call | None:
    """The spoiled call of a number, or None if the way does not apply to the operand."""
    rng = np.random.default_rng(seed)
    operation = str(rng.choice(list(OPERATIONS)))
    variant, chosen = int(rng.integers(variants)), WAYS[int(rng.integers(len(WAYS)))]
    exact = chosen in (nan, index, dtype, stride) or variant % 3 == 0
    operands = base(
        operation, variant, seed % 2, "float32" if exact else ("bfloat16", "float16")[variant % 2]
    )
    call = place(operation, operands, library)
    call.bound = rng.random() < 0.25
    arrays = call.arrays()
    if chosen is index:
        arrays = [name for name in arrays if name.endswith(INDICES)]
    name = str(rng.choice(arrays))
    value = call.buffers[name].seen_in(call.buffers[name].before, call.arguments[name])
    if not (done := chosen(call, name, value, rng)):
        return None
    way = "a bound call" if call.bound else "a call"
    call.story = (
        f"spoil({seed}): {way} of {operation}, variant {variant}, `{name}`: {chosen.__name__}, {done}"
    )
    return call


def spoil(
    seeds: Iterable[int],
    library: ModuleType,
    report: Callable[[str], None] | None = None,
    variants: int = VARIANTS,
) -> Counter[Any]:
    """Make the calls of these numbers. Returns how many came to which end, by the way they were spoiled.

    report: told of a finding, instead of raising it. variants: valid calls of each operation to start from.
    """
    counts: Counter[Any] = Counter()
    for seed in seeds:
        with suppress(KdaError):
            kda_cupy.check_errors()
        call = make(seed, library, variants)
        if call is None:
            continue
        way = call.story.split("`: ")[1].split(",")[0]
        try:
            counts[judge(call), way] += 1
        except Exception as finding:
            if report is None:
                raise
            counts["finding", way] += 1
            report(f"{type(finding).__name__}: {finding}" if isinstance(finding, Finding)
                   else f"{call.story}: {type(finding).__name__}: {finding}")  # fmt: skip
    return counts
