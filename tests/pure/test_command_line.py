# SPDX-License-Identifier: Apache-2.0
"""What every command has in common: help that teaches, exit codes, completion, pipes, Ctrl-C."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from kda_cupy import catalogue, cli, exit_codes
from kda_cupy.cli import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "command_line.md").read_text(encoding="utf-8")


def commands(group=main, path=()):
    """Every command by its words."""
    found = {path: group}
    for name, command in getattr(group, "commands", {}).items():
        found |= commands(command, (*path, name))
    return found


COMMANDS = commands()
every_command = pytest.mark.parametrize("path", COMMANDS, ids=" ".join)


def run(*arguments, **options):
    return CliRunner().invoke(main, [*map(str, arguments)], prog_name="kda-cupy", **options)


@every_command
def test_help_fits_80_columns_and_ends_with_examples(path):
    result = run(*path, "--help", env={"COLUMNS": "80"})
    assert result.exit_code == 0
    assert max(map(len, result.output.splitlines())) <= 80
    assert f"kda-cupy {' '.join(path)}".strip() in result.output.split("Examples:")[1]


@pytest.mark.parametrize(
    "path", [path for path, each in COMMANDS.items() if hasattr(each, "commands")], ids=" ".join
)
def test_no_summary_of_a_command_is_cut(path):
    listed = run(*path, "--help", env={"COLUMNS": "80"}).output.split("Commands:\n")[1].split("\n\n")[0]
    assert len(listed.splitlines()) == len(COMMANDS[path].commands) and "..." not in listed


def examples_in(text):
    """Words of each kda-cupy call on a page or in a help text, pipes and comments cut off."""
    for line in text.splitlines():
        for call in re.findall(r"(?:^|[|(;] ?|\s{2})kda-cupy [^|>)]*", re.sub(r"#.*", "", line)):
            words = shlex.split(call.strip("|(; "))[1:]
            if words and not any(word.isupper() for word in words[:2]):
                yield words


def check_words(words):
    """That click knows the command and each of its options."""
    command = main
    while words and words[0] in getattr(command, "commands", {}):
        command, words = command.commands[words[0]], words[1:]
    known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)} | {"--help"}
    assert {word for word in words if word.startswith("--")} <= known, words
    assert not hasattr(command, "commands") or words in ([], ["--help"]), words


@every_command
def test_examples_of_the_help_exist(path):
    epilog = COMMANDS[path].epilog.split("Exit codes")[0]
    found = list(examples_in(epilog))
    assert found
    for words in found:
        check_words(words)


def test_examples_of_the_page_exist():
    found = list(examples_in("\n".join(re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL))))
    found += [shlex.split(words) for words in re.findall(r"`kda-cupy ([^`]+)`", PAGE)]
    assert len(found) > 8
    for words in found:
        check_words(words)
    for name, _ in ((name, None) for name in main.commands):
        assert f"kda-cupy {name}" in PAGE


def test_links_of_the_page_exist():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", PAGE):
        assert (ROOT / "docs" / target).exists(), target


def test_exit_codes_stand_in_one_table_in_help_and_on_the_page():
    shown = dict(re.findall(r"^\| (\d+) \| (.+) \|$", PAGE, re.MULTILINE))
    assert {int(code): words for code, words in shown.items()} == exit_codes.MEANING
    told = " ".join(run("--help").output.split("Exit codes")[1].split())
    assert all(f"{code} {words}" in told for code, words in exit_codes.MEANING.items())


@every_command
def test_a_wrong_option_is_one_sentence_and_exit_code_2(path):
    result = run(*path, "--no-such-option")
    assert result.exit_code == exit_codes.REFUSED
    *_, last = result.stderr.strip().splitlines()
    assert last.startswith("Error: ") and "--no-such-option" in last and result.stdout == ""


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("bench decode --batch 1,x", "is not a list such as 1,8,64"),
        ("bench decode --batch 0", "a batch has 1 to 1,048,576 rows"),
        ("bench decode --preset kimi", "'kimi' is not one of"),
        ("bench show nothing.json", "'nothing.json' does not exist"),
        ("errors state-dtyp", "did you mean KDA-STATE-DTYPE"),
        ("errors state-dtype --search x", "give CODE or --search TEXT, not both"),
        ("completion csh", "'csh' is not one of 'bash', 'zsh', 'fish'"),
        ("check --dtype float64", "'float64' is not one of"),
        ("check --json no/such/folder.json", "there is no folder no/such"),
        ("check --device x", "'x' is not a valid integer range"),
    ],
)
def test_what_is_wrong_is_said(words, wanted):
    result = run(*words.split())
    assert result.exit_code == exit_codes.REFUSED and wanted in result.stderr


@pytest.mark.parametrize("name", sorted(main.commands))
def test_ctrl_c_is_exit_code_130_and_no_traceback(name, monkeypatch):
    def interrupted(self, ctx):
        raise KeyboardInterrupt

    monkeypatch.setattr(click.Command, "invoke", interrupted)
    result = run(name)
    if isinstance(main.commands[name], click.Group):
        return  # without a command of its own it shows its help
    assert result.exit_code == exit_codes.INTERRUPTED and "interrupted" in result.stderr


# Completion


def completed(words, number):
    """What bash is told: kind and value of each proposal."""
    environment = {"_KDA_CUPY_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(number)}
    result = run(env=environment)
    return [line.split(",", 1)[1] for line in result.output.splitlines()]


def test_commands_options_values_and_codes_are_completed():
    assert completed("kda-cupy b", 1) == ["bench"]
    assert "--peer" in completed("kda-cupy bench decode --p", 3)
    assert completed("kda-cupy check --backend n", 3) == ["numpy"]
    assert completed("kda-cupy errors kda-state-d", 2) == [
        code for code in catalogue.CATALOGUE if code.startswith("KDA-STATE-D")
    ]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_for_shells_call_this_program(shell):
    result = run("completion", shell)
    assert result.exit_code == 0
    assert "_KDA_CUPY_COMPLETE" in result.output and "kda-cupy" in result.output


# Pipes


@pytest.mark.parametrize(
    "words",
    ["check --dtype float32", "bench decode --batch 1 --repeats 9", "errors", "errors KDA-STATE-LAYOUT"],
)
def test_a_pipe_that_knows_ascii_alone_gets_plain_text(words):
    environment = {"PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT), "FORCE_COLOR": "", "PATH": ""}
    backend = [] if words.startswith("errors") else ["--backend", "numpy"]
    done = subprocess.run(
        [sys.executable, "-m", "kda_cupy", *words.split(), *backend],
        env=environment, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii() and b"\x1b" not in done.stdout and b"\r" not in done.stderr
    assert max(map(len, done.stdout.decode().splitlines())) <= 80 or words == "errors KDA-STATE-LAYOUT"


def test_letters_that_a_pipe_does_not_know_are_no_error():
    code = (
        "import click; from kda_cupy.cli import main\n"
        "main.add_command(click.command(name='x')(lambda: click.echo('a\u2500b')))\n"
        "main(['x'])"
    )
    environment = {"PYTHONIOENCODING": "latin-1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, b"a?b\n"), done.stderr


def test_every_command_is_listed_where_it_is_added():
    assert set(main.commands) == {
        "bench",
        "check",
        "completion",
        "doctor",
        "errors",
        "replay",
        "report",
        "warmup",
    }
    assert cli.main is main
