# SPDX-License-Identifier: Apache-2.0
"""Every kernel for every architecture, without a GPU: it compiles, spills nothing, stays under a register ceiling."""

from __future__ import annotations

import dataclasses
import io
import re
import struct

import pytest

from kda_cupy import sources
from kda_cupy.bench import yardstick
from kda_cupy.config import (
    CommitConfig,
    ConvUpdateConfig,
    KernelConfig,
    MtpVerifyConfig,
    PackedDecodeConfig,
    StepConfig,
    YardstickConfig,
)
from kda_cupy.modules import OPTIONS
from kda_cupy.ops import conv_params, mtp_params, packed_decode, step_params

core = pytest.importorskip("cuda.core")

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")
#: 72 registers leave 28 one-warp blocks on an SM of sm_90: seven times the loads in flight that its memory needs.
REGISTERS = 80

BASE = PackedDecodeConfig(
    per_key_gate=True, bounded=True, K=128, V=128, activation="bfloat16", a="bfloat16", b="bfloat16",
    A_log="float32", dt_bias="float32", vector=True, params_bytes=packed_decode._PARAMS_BYTES,
)  # fmt: skip


def variants() -> dict[str, tuple[KernelConfig, int]]:
    """Configurations and their register ceilings: each axis of the configuration through all of its values."""

    def vary(**changes: object) -> PackedDecodeConfig:
        return dataclasses.replace(BASE, **changes)

    found: dict[str, tuple[KernelConfig, int]] = {}
    for op, per_key in (("kda", True), ("gdn", False)):
        for bounded in (True, False):
            for dtype in ("bfloat16", "float16", "float32"):
                config = vary(per_key_gate=per_key, bounded=bounded, activation=dtype, a=dtype, b=dtype)
                found[f"{op}-{'bounded' if bounded else 'softplus'}-{dtype}"] = (config, REGISTERS)
    ceilings = {
        (4, 4): 80, (32, 64): 80, (64, 64): 80, (100, 100): 96, (128, 20): 96, (192, 128): 168, (256, 256): 168,
        (512, 512): 255,
    }  # fmt: skip
    for (K, V), ceiling in ceilings.items():
        found[f"K{K}-V{V}"] = (vary(K=K, V=V), ceiling)
    found["fp32-gates"] = (vary(a="float32", b="float32"), REGISTERS)
    found["half-parameters"] = (vary(A_log="float16", dt_bias="bfloat16"), REGISTERS)
    found["unaligned"] = (vary(vector=False), REGISTERS)
    found["unaligned-fp32-gdn"] = (vary(vector=False, per_key_gate=False, activation="float32"), REGISTERS)
    for dtype, bounded, vector in (
        ("bfloat16", True, True),
        ("bfloat16", False, True),
        ("float32", False, True),
        ("float16", False, False),
    ):
        verify = MtpVerifyConfig(
            bounded, dtype, "float32", dtype, dtype, "float32", "float32", "float32", vector,
            mtp_params.VERIFY_PARAMS_BYTES,
        )  # fmt: skip
        # 128 registers: two blocks of 256 threads an SM, before sm_100. The others have one, and may take more.
        ceiling = 128 if vector and dtype != "float32" else 255
        found[f"verify-{'bounded' if bounded else 'softplus'}-{dtype}{'' if vector else '-unaligned'}"] = (
            verify,
            ceiling,
        )
    for dtype, vector in (("bfloat16", True), ("float32", True), ("float16", False)):
        commit = CommitConfig(dtype, vector, mtp_params.COMMIT_PARAMS_BYTES)
        found[f"commit-{dtype}{'' if vector else '-unaligned'}"] = (commit, 128 if vector else 255)
    step = StepConfig(
        per_key_gate=True, bounded=True, group=1, activation="bfloat16", conv_weight="float32", g="bfloat16",
        beta="bfloat16", A_log="float32", dt_bias="float32", onorm_weight="float32", vector=True,
        params_bytes=step_params.PARAMS_BYTES,
    )  # fmt: skip
    steps: dict[str, dict[str, object]] = {
        "kda": {},
        "kda-softplus": {"bounded": False},
        "kda-fp32": dict.fromkeys(("activation", "g", "beta"), "float32"),
        "kda-fp16-half-parameters": dict.fromkeys(
            ("activation", "conv_weight", "g", "beta", "A_log", "dt_bias"), "float16"
        ),
        "kda-bf16-weights": {"conv_weight": "bfloat16", "onorm_weight": "bfloat16", "g": "float32"},
        "kda-unaligned": {"vector": False, "bounded": False},
        "gdn-group2": {"per_key_gate": False, "bounded": False, "group": 2},
        "gdn-bounded": {"per_key_gate": False},
        "gdn-group2-fp32": {"per_key_gate": False, "group": 2, "activation": "float32", "bounded": False},
        "kda-group3": {"group": 3, "bounded": False},
        "gdn-group4": {"group": 4, "per_key_gate": False, "bounded": False},
        "gdn-group8-fp32": {"group": 8, "per_key_gate": False, "activation": "float32", "g": "float32"},
    }
    for name, changes in steps.items():
        config = dataclasses.replace(step, **changes)
        # 64 registers: 1,024 threads an SM, 128 KiB of state in flight. A group that is walked has 512, and keeps more.
        found[f"step-{name}"] = (config, 64 if config.group <= 2 else 128)
    for width, dtype, silu in ((2, "float32", False), (3, "float16", True), (4, "bfloat16", True)):
        update = ConvUpdateConfig(
            width, silu, dtype, "float32", conv_params.THREADS, conv_params.PARAMS_BYTES
        )
        found[f"conv-{width}-{dtype}"] = (update, 64)
    for moves, (warps, loads), ceiling in (
        ("RW", yardstick.NARROW, 64),
        ("R", yardstick.NARROW, 64),
        ("R", yardstick.WIDE, 96),
        ("SNAP", yardstick.NARROW, 80),
    ):
        config = YardstickConfig(moves, 128, 128, warps, loads, yardstick._LAYOUT.size)
        found[f"yardstick-{moves}-{warps}x{loads}"] = (config, ceiling)
    return found


VARIANTS = variants()


def compile_cubin(config: KernelConfig, arch: str) -> tuple[bytes, str]:
    macros = [tuple(define.removeprefix("-D").split("=")) for define in config.defines()]
    options = core.ProgramOptions(arch=arch, std="c++17", ftz=True, define_macro=macros, ptxas_options=["-v"])
    log = io.StringIO()
    program = core.Program(sources.flatten(config.source), "c++", options)
    return program.compile("cubin", logs=log).code, log.getvalue()


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", VARIANTS)
def test_compiles_without_spills_and_with_few_registers(name: str, arch: str) -> None:
    config, ceiling = VARIANTS[name]
    cubin, log = compile_cubin(config, arch)
    assert config.entry.encode() in cubin
    assert re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log) == [
        ("0", "0", "0")
    ], log
    (registers,) = re.findall(r"Used (\d+) registers", log)
    one_block = arch in ("sm_100", "sm_120") and ceiling == 128
    assert int(registers) <= (255 if one_block else ceiling), log
    assert "warning" not in log.lower(), log


def test_options_are_those_of_the_runtime() -> None:
    """What this file compiles with is what modules.py passes: CuPy adds -arch and -ftz=true by itself."""
    assert OPTIONS == ("--std=c++17",)


def test_no_kernel_includes_a_header_of_others() -> None:
    """E1, E3, E4: nothing but NVRTC is needed, so no missing toolkit header can stop anybody."""
    for name in sources.kernel_names():
        assert "#include" not in sources.flatten(name)


PACKED_DECODE_FORMAT = packed_decode._PER_CALL.format + packed_decode._PER_PLAN.format


@pytest.mark.parametrize(
    "source, mirror, layout",
    [
        ("packed_decode.cu", packed_decode.PackedDecodeParams, PACKED_DECODE_FORMAT),
        ("yardstick.cu", yardstick.YardstickParams, yardstick._LAYOUT.format),
    ],
)
def test_parameter_structs_mirror_the_kernels(source: str, mirror: type, layout: str) -> None:
    """Names, order and types of a NamedTuple here are those of the struct of the same name in the kernel."""
    body = re.search(rf"struct {mirror.__name__} \{{(.*?)\}};", sources.read_kernel(source), re.DOTALL)
    assert body
    letters, names = "", []
    for line in body[1].splitlines():
        declaration = re.sub(r"//.*", "", line).strip().rstrip(";")
        if declaration:
            kind, first, more = re.fullmatch(r"(.*?[ *])(\w+)((?:, \w+)*)", declaration).groups()
            fields = [first, *re.findall(r"\w+", more)]
            names += fields
            letters += (
                "Q" if "*" in kind else {"long long": "q", "int": "i", "float": "f"}[kind.strip()]
            ) * len(fields)
    assert tuple(names) == mirror._fields
    assert letters == "".join(
        letter * int(count or 1) for count, letter in re.findall(r"(\d*)([Qqif])", layout)
    )
    assert struct.calcsize(f"@{letters}0q") == sum(
        struct.calcsize(part) for part in re.findall("<[^<]+", layout)
    )


def test_the_struct_size_is_checked_by_the_compiler() -> None:
    with pytest.raises(Exception, match="host and device disagree"):
        compile_cubin(dataclasses.replace(BASE, params_bytes=BASE.params_bytes + 8), "sm_90")


def test_bfloat16_is_refused_below_ampere() -> None:
    """E18: the host refuses by capability first; the kernel would say why."""
    with pytest.raises(Exception, match=r"compute capability 8\.0"):
        compile_cubin(BASE, "sm_75")
