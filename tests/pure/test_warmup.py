# SPDX-License-Identifier: Apache-2.0
"""Which kernels a warm-up makes, and what the command says. The compiler itself is asked in tests/compile."""

import re
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from fake_cupy import fake_cubin, machine, on_gpu
from mtp_problems import commit_operands, make_mtp
from problems import make_problem, np_dtype
from step_problems import make_step

from kda_cupy import (
    causal_conv1d_update,
    cubins,
    gdn_decode_step,
    gdn_packed_decode,
    kda_commit,
    kda_decode_mtp,
    kda_decode_step,
    kda_packed_decode,
    modules,
    nvrtc,
    warmup,
)
from kda_cupy.bench.cases import PRESETS
from kda_cupy.cli import main

KNOWN = ["sm_75", "sm_80", "sm_90", "sm_100"]


@pytest.fixture
def compiler(monkeypatch):
    """An NVRTC that knows four architectures and compiles anything; gives what it was asked for."""
    asked = []

    def compile_cubin(source, name, arch, options):
        asked.append((name, arch))
        return fake_cubin(f"{arch} {options}")

    monkeypatch.setattr(nvrtc, "compile_cubin", compile_cubin)
    monkeypatch.setattr(nvrtc, "architectures", lambda: KNOWN)
    monkeypatch.setattr(nvrtc, "version", lambda: "13.5")
    monkeypatch.delenv(cubins.VARIABLE, raising=False)
    return asked


def run(*arguments):
    return CliRunner().invoke(main, ["warmup", *map(str, arguments)])


def same(problem):
    return {name: on_gpu(value) if hasattr(value, "shape") else value for name, value in problem.items()}


# The list


def conv_problem(weights, dtype):
    """One row of the convolution alone, packed."""
    history = np.ones((2, 3, 512), np_dtype(dtype)).swapaxes(1, 2)
    weight = np.ones((512, 4), np_dtype(weights))
    indices = np.array([1], np.int32)
    return {"x": np.ones((1, 512), np_dtype(dtype)), "weight": weight, "conv_state": history} | {
        "conv_state_indices": indices, "activation": "silu",
    }  # fmt: skip


def requested(case):
    """The configurations that calls with a model's geometry ask for."""
    op = {"kda": kda_packed_decode, "gdn": gdn_packed_decode}[case.op]
    shape = {"H": case.H, "HV": case.HV, "K": case.K, "V": case.V, "dtype": case.dtype}
    common = {"B": 1, "P": 2, "slots": [1], "lower_bound": case.lower_bound}
    with machine():
        for gates in (case.dtype, "float32"):
            for parameters in (case.dtype, "float32"):
                types = {"a_dtype": gates, "b_dtype": gates, "gate_dtype": parameters}
                op(**same(make_problem(case.op, **shape, **common, **types)))
        step = {"kda": kda_decode_step, "gdn": gdn_decode_step}[case.op]
        for onorm, weights in ((True, case.dtype), (False, "float32")):
            options = {"onorm": onorm, "weight_dtype": weights, "lower_bound": case.lower_bound}
            step(**same(make_step(case.op, 1, 1, case.HV // case.H, case.dtype, **options)))
            causal_conv1d_update(**same(conv_problem(weights, case.dtype)))
        if case.op == "kda":
            for t, mode, onorm, weights in (
                (3, "rings", True, case.dtype),
                (12, "snapshots", False, "float32"),
            ):
                problem = make_mtp(
                    1, t, 1, case.HV // case.H, case.dtype, mode=mode, lower_bound=case.lower_bound, onorm=onorm,
                    weight_dtype=weights,
                )  # fmt: skip
                kda_decode_mtp(**same(problem))
                for conv in (True, False):
                    kda_commit(**same(commit_operands(problem, [1], conv=conv)))
        return {config for config, _ in modules._kernels}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("preset", PRESETS)
def test_a_model_finds_its_kernels(preset, dtype):
    """What the operations ask for, called with the model's own geometry, is on the list; and only once."""
    case = replace(PRESETS[preset], dtype=dtype)
    listed = warmup.variants(case)
    assert len(set(listed)) == len(listed)
    asked = requested(case)
    assert len(asked) >= (4 if case.op == "gdn" else 8) - 3 * (dtype == "float32")
    assert asked <= set(listed)


def test_batch_and_heads_change_no_kernel():
    case = PRESETS["kimi-k3"]
    assert (
        warmup.variants(case)
        == warmup.variants(replace(case, B=64))
        == warmup.variants(PRESETS["kimi-k3-tp8"])
    )


def test_other_head_dims_have_no_verify():
    names = {config.entry for config in warmup.variants(replace(PRESETS["kimi-k3"], K=64))}
    assert names == {"packed_decode"}


# The command


def test_a_warm_up_says_how_many_where_and_how_long(compiler, tmp_path):
    count = len(warmup.variants(PRESETS["kimi-k3-tp8"]))
    result = run(
        "--preset", "kimi-k3-tp8", "--arch", "sm_90", "--arch", "sm_80", "--into", tmp_path / "new" / "folder"
    )
    assert result.exit_code == 0, result.output
    assert len(list((tmp_path / "new" / "folder").iterdir())) == len(compiler) == 2 * count
    pattern = (
        rf"{2 * count} kernels for sm_90, sm_80 in {re.escape(str(tmp_path))}/new/folder\n"
        rf"{2 * count} compiled by NVRTC 13\.5 in \d+\.\d s \(\d+\.\d\d MB\), 0 there already\n"
        rf"to use them: export KDA_CUPY_CUBINS={re.escape(str(tmp_path))}/new/folder\n"
    )
    assert re.fullmatch(pattern, result.output), result.output


def test_presets_that_share_kernels_compile_them_once(compiler, tmp_path):
    run("--preset", "kimi-k3", "--preset", "kimi-k3-tp8", "--arch", "sm_90", "--into", tmp_path)
    assert len(compiler) == len(set(warmup.variants(PRESETS["kimi-k3"])))


def test_what_is_there_is_kept_unless_forced(compiler, tmp_path):
    arguments = ("--preset", "qwen3-next", "--arch", "sm_90", "--into", tmp_path)
    run(*arguments)
    count = len(compiler)
    assert f"0 compiled by NVRTC 13.5 in 0.0 s (0.00 MB), {count} there already" in run(*arguments).output
    assert len(compiler) == count
    run(*arguments, "--force")
    assert len(compiler) == 2 * count
    assert len(list(tmp_path.iterdir())) == count


def test_what_is_damaged_is_replaced(compiler, tmp_path):
    arguments = ("--preset", "qwen3-next", "--arch", "sm_90", "--into", tmp_path)
    run(*arguments)
    count = len(compiler)
    bad, stray = sorted(tmp_path.iterdir())[:2]
    bad.write_bytes(bad.read_bytes()[:-1])
    stray.rename(stray.with_name(stray.name.replace(cubins.parse(stray).content, "0" * 32)))
    assert "2 compiled" in run(*arguments).output
    assert len(list(tmp_path.iterdir())) == count
    assert not any(map(cubins.damage, tmp_path.iterdir()))


def test_the_runtime_loads_what_was_warmed_up(compiler, tmp_path, monkeypatch):
    monkeypatch.setenv(cubins.VARIABLE, str(tmp_path))
    assert "to use them" not in run("--preset", "kimi-linear-48b-tp4", "--arch", "sm_90").output
    case = PRESETS["kimi-linear-48b-tp4"]
    with machine() as cupy:
        for config in warmup.variants(case):
            assert modules.get_kernel(config, 0).compiled_ahead
    assert {entry[0] for entry in cupy.log} == {"load"}


def test_the_default_folder_is_inside_the_package(compiler, tmp_path, monkeypatch):
    monkeypatch.setattr(cubins, "PACKAGED", tmp_path / "inside")
    result = run("--preset", "qwen3-next", "--arch", "sm_90")
    assert f"in {tmp_path}/inside\n" in result.output
    assert "to use them" not in result.output
    assert list((tmp_path / "inside").iterdir())


def test_without_arch_the_gpus_of_the_machine_are_meant(compiler, tmp_path):
    with machine(gpus=3, capability=("90", "80", "90")):
        result = run("--preset", "qwen3-next", "--into", tmp_path)
    assert "kernels for sm_90, sm_80 in" in result.output
    assert {arch for _, arch in compiler} == {"sm_90", "sm_80"}


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 2, "Missing option '--preset'"),
        (("--preset", "gpt"), 2, "'gpt' is not one of 'kimi-linear-48b'"),
        (("--preset", "qwen3-next"), 2, "no GPU here to compile for (KDA-COMPILER-NO-CUPY); name one"),
        (("--preset", "qwen3-next", "--arch", "9.0"), 2, "such as sm_90"),
        (("--preset", "qwen3-next", "--arch", "sm_90a"), 2, "such as sm_90"),
        (("--preset", "qwen3-next", "--arch", "sm_52"), 2, "KDA-COMPILER-ARCH"),
        (("--preset", "qwen3-next", "--arch", "sm_130"), 2, "Got sm_130; NVRTC 13.5 compiles for sm_75, sm_80,"),
        (("--preset", "qwen3-next", "--arch", "sm_75"), 2, "sm_75 has no bfloat16; give --dtype float16 or float32"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_said_before_anything_is_compiled(compiler, arguments, code, words):
    with machine(cupy=False):
        result = run(*arguments)
    assert result.exit_code == code
    assert words in " ".join(result.output.split())
    assert "Traceback" not in result.output
    assert not compiler


def test_a_folder_that_cannot_be_written_is_said_with_the_way_out(compiler, tmp_path):
    (tmp_path / "file").touch()
    result = run("--preset", "qwen3-next", "--arch", "sm_90", "--into", tmp_path / "file" / "folder")
    assert result.exit_code == 2
    assert "Not a directory" in result.output
    assert "--into names another folder" in result.output


def test_a_missing_compiler_is_one_line(monkeypatch):
    def missing():
        raise nvrtc.DynamicLibNotFoundError("Failure finding libnvrtc.so\nlong advice")

    monkeypatch.setattr(nvrtc, "_library", missing)
    result = run("--preset", "qwen3-next", "--arch", "sm_90")
    assert result.exit_code == 2
    assert "KDA-COMPILER-NVRTC: NVRTC, which compiles the kernels, cannot be loaded." in result.output
    assert "Traceback" not in result.output


def test_progress_is_a_line_on_a_terminal_and_nothing_elsewhere(compiler, tmp_path, capsys):
    wanted = [(config, "sm_90") for config in warmup.variants(PRESETS["qwen3-next"])]
    warmup.fill(tmp_path, wanted)
    assert capsys.readouterr().err == ""
    warmup.fill(tmp_path, wanted, anew=True, show=True)
    shown = capsys.readouterr().err
    assert "\n" not in shown
    for number, (config, _) in enumerate(wanted, 1):
        assert f"\r[{number}/{len(wanted)}] sm_90 {config.variant}"[:60] in shown
    assert shown.endswith(f"\r{'':79}\r")
