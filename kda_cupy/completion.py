# SPDX-License-Identifier: Apache-2.0
"""``kda-cupy completion``: what makes a shell complete commands, options, their values and error codes."""

from __future__ import annotations

from typing import Final

import click
from click.shell_completion import get_completion_class

from kda_cupy.bench.options import Refused, examples

PROGRAM: Final = "kda-cupy"
VARIABLE: Final = "_KDA_CUPY_COMPLETE"
"""Click looks for it when the program starts."""


@click.command(
    short_help="Make the shell complete commands and options.",
    epilog=examples(
        'eval "$(kda-cupy completion bash)"   # now; in ~/.bashrc: always',
        'eval "$(kda-cupy completion zsh)"    # in ~/.zshrc',
        "kda-cupy completion fish > ~/.config/fish/completions/kda-cupy.fish",
    ),
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a script for SHELL: commands, options, their values and error codes are then completed with Tab."""
    kind = get_completion_class(shell)
    if kind is None:
        raise Refused(f"the installed click knows no completion for {shell}")
    root = click.get_current_context().find_root().command
    complete = kind(root, {}, PROGRAM, VARIABLE)
    click.echo(complete.source_template % complete.source_vars())
