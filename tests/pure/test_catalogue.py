# SPDX-License-Identifier: Apache-2.0
"""Every code that is raised has a page, every page is raised, nothing on it is empty, and its examples run."""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from click.testing import CliRunner

import kda_cupy
from kda_cupy import errors as types
from kda_cupy.catalogue import CATALOGUE, PREAMBLE
from kda_cupy.error_pages import (
    as_json,
    as_markdown,
    as_text,
    errors,
    fields,
    first_line,
    is_message_of,
    message_template,
    search,
)
from kda_cupy.errors import KdaError, Page
from kda_cupy.raisers import codes_in_source, raised_by, raisers
from tests.fake_cupy import CompileException, DynamicLibNotFoundError, machine

ROOT = Path(__file__).parents[2]
CODE = re.compile(r"""["'](KDA-[A-Z0-9]+(?:-[A-Z0-9]+)+)["']""")
PAGES = pytest.mark.parametrize("page", CATALOGUE.values(), ids=CATALOGUE)


def every_string(page: Page) -> list[str]:
    texts = [page.code, page.words, page.cure, page.meaning, page.before, page.after]
    return [*texts, *page.when, *page.solutions, *page.related]


# Codes and pages


def test_codes_that_are_raised_have_a_page_and_pages_are_raised() -> None:
    """Read with a regular expression, so that this test shares nothing with kda_cupy.raisers."""
    files = [path for path in (ROOT / "kda_cupy").rglob("*.py") if path.name != "catalogue.py"]
    quoted = {code for path in files for code in CODE.findall(path.read_text(encoding="utf-8"))}
    assert quoted == set(CATALOGUE) == codes_in_source()


def test_errors_are_raised_through_the_catalogue_only() -> None:
    """An exception type of ours is named where it is defined, caught, documented, and nowhere called."""
    kinds = {
        name for name, kind in vars(types).items() if isinstance(kind, type) and issubclass(kind, KdaError)
    }
    for path in (ROOT / "kda_cupy").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
            assert called not in kinds, f"{path}:{getattr(node, 'lineno', 0)} makes {called} by hand"


def test_codes_are_keys_in_the_order_of_the_families() -> None:
    assert all(code == page.code for code, page in CATALOGUE.items())
    families = [code.split("-")[1] for code in CATALOGUE]
    assert families == sorted(
        families,
        key=["STATE", "PACKED", "VERIFY", "COMMIT", "CONV", "VALUE", "ARRAY", "POOL", "COMPILER"].index,
    )


def test_types_are_those_of_the_specification() -> None:
    """Shapes and options are OperandError, places DeviceError, slots SlotError, foreign things BridgeError."""
    assert issubclass(types.OperandError, ValueError) and issubclass(types.DeviceError, ValueError)
    assert issubclass(types.SlotError, IndexError) and issubclass(types.BridgeError, TypeError)
    for kind in (types.PoolExhausted, types.CompileError, types.NoGpuError):
        assert issubclass(kind, RuntimeError) and issubclass(kind, KdaError)
    others = {
        types.DeviceError: {
            *("KDA-STATE-DEVICE", "KDA-PACKED-DEVICES", "KDA-ARRAY-HOST-ON-DEVICE", "KDA-ARRAY-BF16-SUPPORT")
        },
        types.SlotError: {
            *(
                "KDA-VALUE-SLOT-RANGE",
                "KDA-VALUE-SLOT-DUPLICATE",
                "KDA-VALUE-ROW-RANGE",
                "KDA-VALUE-LENGTH-RANGE",
                "KDA-VALUE-ACCEPT-RANGE",
                "KDA-POOL-RESERVED",
                "KDA-POOL-DOUBLE-RELEASE",
                "KDA-POOL-NOT-IN-USE",
                "KDA-POOL-NOT-FREE",
            )
        },
        types.BridgeError: {"KDA-ARRAY-KIND", "KDA-ARRAY-CAPSULE"},
        types.PoolExhausted: {"KDA-POOL-EXHAUSTED"},
        types.NoGpuError: {
            *("KDA-COMPILER-NO-GPU", "KDA-COMPILER-NO-CUPY", "KDA-COMPILER-TWO-CUPY", "KDA-COMPILER-DRIVER")
        },
    }
    for kind, codes in others.items():
        assert {code for code, page in CATALOGUE.items() if page.exception is kind} == codes
    compiler = {code for code in CATALOGUE if code.startswith("KDA-COMPILER")}
    errors_of_it = {code for code, page in CATALOGUE.items() if page.exception is types.CompileError}
    assert errors_of_it == compiler - others[types.NoGpuError]


@PAGES
def test_no_field_is_left_empty(page: Page) -> None:
    assert all(text.strip() == text and text for text in every_string(page))
    assert page.when and page.solutions and page.related
    assert page.meaning.endswith(".") and all(
        each.endswith((".", ")")) for each in (*page.when, *page.solutions)
    )
    assert 1 <= len(re.findall(r"[.?!](?: |$)", page.meaning)) <= 4, "two or three sentences"


@PAGES
def test_words_and_cure_make_one_message(page: Page) -> None:
    """The cure is one clause: it begins like a command, and its full stop is added with the others."""
    assert page.cure[0].isupper() and not page.cure.endswith(".")
    assert not page.words.endswith(("!", "?", ",", ":"))
    assert not set(fields(page.cure)) & {"got"}
    assert "  " not in message_template(page) and ".." not in message_template(page).replace("8, .., 512", "")


@PAGES
def test_related_pages_exist(page: Page) -> None:
    assert set(page.related) <= CATALOGUE.keys() - {page.code}
    assert len(set(page.related)) == len(page.related)


@PAGES
def test_predicates_are_public(page: Page) -> None:
    if page.predicate:
        assert page.predicate in kda_cupy.__all__
        assert f"`{page.predicate}`" in as_markdown() or page.predicate in as_text(page)


def test_importing_the_catalogue_imports_no_cupy() -> None:
    script = "import sys, kda_cupy.catalogue, kda_cupy.error_pages; sys.exit('cupy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False).returncode == 0


# Raised by


def test_raised_by_is_what_the_source_says() -> None:
    packed = ("bind", "gdn_packed_decode", "kda_packed_decode")

    def operations(code: str) -> tuple[str, ...]:
        """Without the methods of layers, which raise what the operations do."""
        return tuple(name for name in raised_by(code) if "Layer." not in name)

    assert operations("KDA-PACKED-BATCH") == ("bind", "gdn_decode_step", *packed[1:])  # by way of a registry
    steps = {"causal_conv1d_update", "gdn_decode_step", "kda_commit", "kda_decode_mtp", "kda_decode_step"}
    every = {*steps, *packed}
    pool = {"StatePool.import_state", "StatePool.wrap"}
    assert set(operations("KDA-ARRAY-ALIGNMENT")) == every | pool
    assert operations("KDA-VERIFY-QK-SHAPE") == ("bind", "kda_decode_mtp", "kda_decode_step")
    assert operations("KDA-CONV-X-SHAPE") == ("bind", "causal_conv1d_update")
    assert "KdaLayer.decode" in raised_by("KDA-VERIFY-QK-SHAPE")
    assert raised_by("KDA-COMMIT-NO-VERIFY") == ("GdnLayer.commit", "KdaLayer.commit")
    assert operations("KDA-VERIFY-TREE") == ("bind", "kda_decode_mtp")
    assert operations("KDA-COMMIT-LAYERS") == ("bind", "kda_commit")
    assert operations("KDA-STATE-RANK") == ("StatePool.wrap", "bind", "check_state", *packed[1:])
    assert operations("KDA-VALUE-OPERATION") == ("bind",)
    taking = ("StatePool.allocate", "StatePool.fork", "StatePool.import_state", "StatePool.slot")
    assert raised_by("KDA-POOL-EXHAUSTED") == taking  # through an attribute
    assert raised_by("KDA-POOL-FILE") == ("StatePool.load",)
    assert raised_by("KDA-POOL-RESERVED") == (
        "StatePool.release",
        "StatePool.slot",
    )  # not allocate, which tidies up
    assert "check_errors" in raised_by("KDA-VALUE-SLOT-RANGE")
    assert {"StatePool", "StatePool.for_budget"} <= set(raised_by("KDA-COMPILER-NO-GPU"))  # cls(...)
    assert set(operations("KDA-COMPILER-COMPILE")) == every  # through a cached property
    assert raised_by("KDA-NO-SUCH") == ()


def test_somebody_public_raises_every_code_and_who_only_asks_does_not() -> None:
    assert raisers().keys() == CATALOGUE.keys()
    assert not any("is_valid_state" in names for names in raisers().values())
    for name in {name for names in raisers().values() for name in names}:
        public, _, method = name.partition(".")
        assert public in kda_cupy.__all__
        assert not method or hasattr(getattr(kda_cupy, public), method)


# Examples


def fails(cause: Exception) -> object:
    def fail() -> None:
        raise cause

    return fail


def machines(code: str, *, mended: bool) -> AbstractContextManager[object]:
    """The machine that an example needs, before and after what its last lines ask for in a shell."""
    if code == "KDA-COMPILER-NO-CUPY":
        return machine(cupy=False)
    if code == "KDA-COMPILER-NO-GPU":
        return machine(gpus=0)
    if code == "KDA-ARRAY-BF16-SUPPORT":
        return machine(capability="75")
    broken = {
        "KDA-COMPILER-NVRTC": DynamicLibNotFoundError('Failure finding "libnvrtc.so"'),
        "KDA-COMPILER-HEADERS": RuntimeError(
            "Failed to find CUDA headers. Please install CUDA toolkit headers"
        ),
        "KDA-COMPILER-ARCH": CompileException("nvrtc: error: invalid value for --gpu-architecture (-arch)"),
        "KDA-COMPILER-CACHE": PermissionError(13, "Permission denied", "/home/me/.cupy"),
        "KDA-COMPILER-OLD-GPU": CompileException(
            "ptxas error: Feature '.tf32' requires .target sm_80 or higher"
        ),
        "KDA-COMPILER-TMPDIR": FileNotFoundError(2, "No usable temporary directory found in ['/tmp']"),
        "KDA-COMPILER-TWO-CUPY": DynamicLibNotFoundError('Failure finding "libnvrtc.so"'),
        "KDA-COMPILER-COMPILE": CompileException('packed_decode.cu(7): error: identifier "x" is undefined'),
    }
    if code in broken and not mended:
        two = ("cupy-cuda12x", "cupy-cuda13x") if code == "KDA-COMPILER-TWO-CUPY" else ("cupy-cuda13x",)
        return machine(fail=fails(broken[code]), wheels=two)
    if code == "KDA-COMPILER-DRIVER" and not mended:
        return machine(driver=12040)
    return machine(gpus=2)


def run_example(page: Page, example: str) -> dict[str, object]:
    """Run the lines of an example as they stand on the page, by themselves."""
    names: dict[str, object] = {}
    exec(compile(PREAMBLE, "<preamble>", "exec"), names)
    kept = {name: names[name].tobytes() for name in ("mixed_qkv", "a", "b", "initial_state")}
    arrays = {name: names[name] for name in kept}
    try:
        exec(compile(example, f"<{page.code}>", "exec"), names)
    except KdaError:
        assert {name: array.tobytes() for name, array in arrays.items()} == kept, "a refusal changes nothing"
        raise
    return names


@PAGES
def test_the_example_meets_the_error(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUPY_CACHE_DIR", raising=False)
    with machines(page.code, mended=False), pytest.raises(page.exception) as caught:
        run_example(page, page.before)
    assert caught.value.code == page.code
    assert type(caught.value) is page.exception


@PAGES
def test_the_mended_example_runs(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPY_CACHE_DIR", "")  # put back afterwards, whatever the example sets
    with machines(page.code, mended=True):
        run_example(page, page.after)


@PAGES
def test_examples_are_short_and_say_what_machine_they_need(page: Page) -> None:
    assert page.before != page.after
    for example in (page.before, page.after):
        assert all(len(line) <= 76 for line in example.splitlines()), "a page indents it by four"
    uses_gpu = "import cupy" in page.before
    assert bool(page.needs) == (uses_gpu or page.code.startswith("KDA-COMPILER"))


# Rendering


@PAGES
def test_text_holds_the_whole_page_in_80_columns(page: Page) -> None:
    text = as_text(page)
    assert max(map(len, text.splitlines())) <= 80
    flat = " ".join(text.split())
    for part in (page.code, page.exception.__name__, message_template(page), page.meaning, page.needs):
        assert " ".join(part.split()) in flat
    for part in (*page.when, *page.solutions, *page.related, *raised_by(page.code), page.predicate):
        assert " ".join(part.split()) in flat
    for example in (page.before, page.after):
        assert "\n".join(f"    {line}" if line else "" for line in example.splitlines()) in text


def test_docs_errors_md_is_not_stale() -> None:
    written = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    assert written == as_markdown(), "run: python scripts/write_error_docs.py"


def test_markdown_is_complete_and_its_links_lead_somewhere() -> None:
    text = as_markdown()
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert headings == list(CATALOGUE)
    assert set(re.findall(r"\]\(#([a-z0-9-]+)\)", text)) == {code.lower() for code in CATALOGUE}
    assert text.count("```") % 2 == 0 and text.endswith("\n") and not text.endswith("\n\n")
    fenced = text.split("```")[1::2]
    for page in CATALOGUE.values():
        assert f"python\n{page.before}\n" in fenced and f"python\n{page.after}\n" in fenced
    prose = re.sub(r"`[^`]*`", "", "".join(text.split("```")[::2]))
    assert not re.search(r"(?<!\\)[*]|(?<!\\)<(?!!--)", prose), "a formula would turn into emphasis"


def test_the_script_writes_the_page(tmp_path: Path) -> None:
    page = tmp_path / "docs" / "errors.md"
    script = ROOT / "scripts" / "write_error_docs.py"
    subprocess.run(
        [sys.executable, str(script), str(page)], check=True, cwd=tmp_path, stdout=subprocess.DEVNULL
    )
    assert page.read_text(encoding="utf-8") == as_markdown()


def test_json_holds_every_field() -> None:
    data = json.loads(json.dumps(as_json(CATALOGUE.values())))
    assert data["preamble"] == PREAMBLE
    assert [page["code"] for page in data["errors"]] == list(CATALOGUE)
    for page in data["errors"]:
        assert page.keys() == {*Page.__dataclass_fields__, "message", "raised_by"}
        assert page["raised_by"] == list(raised_by(page["code"]))
        assert page["exception"] in kda_cupy.__all__


# Search


def caught_message(page: Page) -> str:
    with machines(page.code, mended=False), pytest.raises(KdaError) as caught:
        run_example(page, page.before)
    return str(caught.value)


@PAGES
def test_search_finds_a_page_from_its_own_message(page: Page) -> None:
    message = caught_message(page)
    assert search(message)[0] is page
    assert is_message_of(page, message)
    in_a_log = (
        f"Traceback (most recent call last):\n  File x.py\n\n| kda_cupy.errors.{page.exception.__name__}: "
    )
    wrapped = re.sub(r"(.{30,50}) ", r"\1\n    ", message)
    assert search(in_a_log + wrapped + "\nexit code 1")[0] is page


@PAGES
def test_search_finds_a_page_from_its_code_and_from_a_message_a_shell_has_chewed(page: Page) -> None:
    assert search(f"what is {page.code.lower()}?")[0] is page
    chewed = re.sub(r"`[^`]*`", "", caught_message(page))  # "..." in a shell runs what is in backticks
    assert page in search(chewed)[:3]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("`a`/`b` must be contiguous in the last dim.", "KDA-PACKED-AB-CONTIGUOUS"),
        ("`mixed_qkv` must be contiguous in the last dim.", "KDA-PACKED-QKV-CONTIGUOUS"),
        ("`initial_state` must be contiguous in the last dim.", "KDA-STATE-CONTIGUOUS"),
        ("`A_log`/`dt_bias` must be contiguous.", "KDA-PACKED-GATE-CONTIGUOUS"),
        ("`out` must be contiguous.", "KDA-PACKED-OUT-CONTIGUOUS"),
        ("`ssm_state_indices` must be 1D for packed decode (got ndim=2)", "KDA-PACKED-INDICES-RANK"),
        ("`initial_state` must be a 4D tensor (got ndim=3).", "KDA-STATE-RANK"),
        ("All inputs must be on the same device.", "KDA-PACKED-DEVICES"),
        ("Mismatched batch sizes: `mixed_qkv.shape[0]=2`", "KDA-PACKED-BATCH"),
        ("expected recurrent state layout [pool, H, V=128, K=128]", "KDA-STATE-LAYOUT"),
        ("pool exhausted", "KDA-POOL-EXHAUSTED"),
        ("bf16", "KDA-ARRAY-BF16-SUPPORT"),
        ("cuda headers", "KDA-COMPILER-HEADERS"),
    ],
)
def test_search_finds_words_that_users_have(words: str, code: str) -> None:
    assert search(words)[0].code == code


def test_search_of_nonsense_finds_nothing() -> None:
    assert search("qwertz uiop") == []
    assert search("") == []


# Command


def run(*arguments: str, stdin: str | None = None) -> tuple[int, str, str]:
    result = CliRunner().invoke(errors, arguments, input=stdin)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    return result.exit_code, result.stdout, result.stderr


def test_command_lists_code_and_first_line() -> None:
    exit_code, output, _ = run()
    lines = output.splitlines()
    assert exit_code == 0
    assert [line.split()[0] for line in lines] == list(CATALOGUE)
    assert max(map(len, lines)) <= 80
    for line, page in zip(lines, CATALOGUE.values(), strict=True):
        assert first_line(page).startswith(line.split(maxsplit=1)[1].removesuffix(" ..."))


@pytest.mark.parametrize("code", ["KDA-STATE-LAYOUT", "kda-state-layout", "State-Layout"])
def test_command_shows_a_page(code: str) -> None:
    exit_code, output, _ = run(code)
    assert exit_code == 0
    assert output == as_text(CATALOGUE["KDA-STATE-LAYOUT"]) + "\n"


def test_command_suggests_codes_that_are_near() -> None:
    exit_code, output, complaint = run("KDA-STATE-LAYOT")
    assert (exit_code, output) == (2, "")
    assert "no error has the code KDA-STATE-LAYOT; did you mean KDA-STATE-LAYOUT" in complaint
    exit_code, _, complaint = run("xyz")
    assert exit_code == 2
    assert "see `kda-cupy errors`" in complaint


def test_command_searches() -> None:
    message = "`initial_state` must be float32. Got float64."
    exit_code, output, _ = run("--search", message)
    assert exit_code == 0
    assert output.startswith(as_text(CATALOGUE["KDA-STATE-DTYPE"]))
    assert run("--search", "-", stdin=f"ValueError: {message}\n") == (exit_code, output, "")
    _, output, _ = run("--search", "slot released twice")
    codes = [line.split()[0] for line in output.splitlines()]
    assert "KDA-POOL-DOUBLE-RELEASE" in codes and len(codes) <= 5
    assert all(len(line) <= 80 for line in output.splitlines())


def test_command_says_when_nothing_is_found() -> None:
    exit_code, output, complaint = run("--search", "qwertz uiop")
    assert (exit_code, output) == (1, "")
    assert "no page has a message like that" in complaint


def test_command_prints_json() -> None:
    assert json.loads(run("--json")[1]) == json.loads(json.dumps(as_json(CATALOGUE.values())))
    one = json.loads(run("state-rank", "--json")[1])
    assert [page["code"] for page in one["errors"]] == ["KDA-STATE-RANK"]
    found = json.loads(run("--search", "KDA-POOL-RESERVED", "--json")[1])
    assert found["errors"][0]["code"] == "KDA-POOL-RESERVED"


def test_command_prints_the_preamble() -> None:
    assert run("--preamble") == (0, PREAMBLE, "")


def test_the_preamble_needs_numpy_only() -> None:
    imports = [
        node for node in ast.walk(ast.parse(PREAMBLE)) if isinstance(node, (ast.Import, ast.ImportFrom))
    ]
    assert {alias.name for node in imports for alias in node.names} == {"numpy", "kda_cupy"}


def test_the_catalogue_is_data() -> None:
    """No function, no class, no import but the types."""
    source = inspect.getsource(sys.modules["kda_cupy.catalogue"])
    assert not [
        node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    ]
    assert "numpy as np" not in source.replace(PREAMBLE, "")
