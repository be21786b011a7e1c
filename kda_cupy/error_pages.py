# SPDX-License-Identifier: Apache-2.0
"""The error catalogue for people: as text, as Markdown (docs/errors.md), as JSON, and by a pasted message.

``kda-cupy errors`` is the command. Everything comes from ``kda_cupy.catalogue``, but who raises an error: that is
read from the source (``kda_cupy.raisers``).
"""

from __future__ import annotations

import difflib
import json
import math
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable
from functools import cache
from string import Formatter
from typing import Any, Final

import click

from kda_cupy.catalogue import CATALOGUE, PREAMBLE
from kda_cupy.errors import Page
from kda_cupy.raisers import raised_by

WIDTH: Final = 80
_LISTED: Final = 5
"""How many pages a search shows."""


def fields(template: str) -> tuple[str, ...]:
    """Names of the fields in a page's ``words`` or ``cure``."""
    return tuple(name for _, name, _, _ in Formatter().parse(template) if name)


def first_line(page: Page) -> str:
    """The words that the message begins with, fields as ``<name>``."""
    return page.words.format(**_placeholders(page))


def message_template(page: Page) -> str:
    """The whole message, fields as ``<name>``."""
    return page.message("<what came>", _placeholders(page))


def _placeholders(page: Page) -> dict[str, object]:
    names = {name: f"<{name}>" for name in (*fields(page.words), *fields(page.cure))}
    return {**names, "got": "<what came>"}


def _kinds(page: Page) -> str:
    """``OperandError (a ValueError)``."""
    builtin = next(kind for kind in page.exception.__mro__ if kind.__module__ == "builtins")
    return f"{page.exception.__name__} (a {builtin.__name__})"


def as_text(page: Page) -> str:
    """A page for a terminal of 80 columns."""
    parts = [f"{page.code}: {_kinds(page)}", _filled(message_template(page))]
    parts += ["What it means", _filled(page.meaning)]
    parts += ["When it happens", "\n".join(_filled(each, "- ") for each in page.when)]
    numbered = enumerate(page.solutions, start=1)
    parts += ["Solutions", "\n".join(_filled(each, f"{number}. ") for number, each in numbered)]
    parts += ["Before", _indented(page.before), "After", _indented(page.after)]
    needs = f" They need {page.needs}." if page.needs else ""
    parts.append(
        _filled(
            f"The examples begin with the lines that `kda-cupy errors --preamble` prints.{needs}", indent=0
        )
    )
    facts = {
        "Without raising": f"kda_cupy.{page.predicate}" if page.predicate else "",
        "Raised by": ", ".join(raised_by(page.code)),
        "Related": ", ".join(page.related),
    }
    parts.append("\n".join(_filled(text, f"{name}: ", indent=0) for name, text in facts.items() if text))
    return "\n\n".join(parts)


def _filled(text: str, bullet: str = "", indent: int = 2) -> str:
    first = " " * indent + bullet
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_on_hyphens=False,
        break_long_words=False,
    )


def _indented(code: str) -> str:
    return textwrap.indent(code, " " * 4)


def as_markdown() -> str:
    """docs/errors.md: all pages, an index first."""
    rows = "\n".join(
        f"| [{page.code}](#{page.code.lower()}) | {_cell(first_line(page))} |" for page in _pages()
    )
    head = f"""\
# Errors

<!-- Written by scripts/write_error_docs.py from kda_cupy/catalogue.py: change that, and run the script. -->

Every refusal of `kda_cupy` has a code, which is `exc.code` and never changes, and a page here. Its message says what
the rule is, what came, and what to do; `exc.operand`, `exc.got`, `exc.wanted` and `exc.hint` hold the parts. After a
refusal nothing has changed: outputs and pools keep their bits. All types derive from `KdaError`.

In a terminal, `kda-cupy errors CODE` shows a page, and `kda-cupy errors --search -` finds the page of a message that
is pasted into it.

The examples run as they are after these lines:

{_fenced(PREAMBLE)}

| code | words |
| --- | --- |
{rows}

"""
    return head + "\n".join(_markdown_page(page) for page in _pages())


def _cell(text: str) -> str:
    """For a cell of a table: fields as "...", and no character that ends the cell."""
    return _prose(re.sub(r"<[\w ]+>", "...", text)).replace("|", "\\|")


def _prose(text: str) -> str:
    """Text as Markdown: what is in backticks stays as it is, and nothing else is a sign."""
    spans = text.split("`")
    spans[::2] = [re.sub(r"[*<]|\b_+|_+\b", _escaped, span) for span in spans[::2]]
    return "`".join(spans)


def _escaped(signs: re.Match[str]) -> str:
    return "".join(f"\\{sign}" for sign in signs[0])


def _markdown_page(page: Page) -> str:
    kind, needs = _kinds(page), f" (needs {page.needs})" if page.needs else ""
    facts = [f"Raised by: {', '.join(f'`{name}`' for name in raised_by(page.code))}."]
    facts += [f"Without raising: `kda_cupy.{page.predicate}`."] if page.predicate else []
    facts += [f"Related: {', '.join(f'[{code}](#{code.lower()})' for code in page.related)}."]
    parts = [
        f"## {page.code}",
        f"{kind}:",
        _fenced(_filled(message_template(page), indent=0), "text"),
        _prose(page.meaning),
        "When it happens:",
        "\n".join(f"- {_prose(each)}" for each in page.when),
        "Solutions:",
        "\n".join(f"{number}. {_prose(each)}" for number, each in enumerate(page.solutions, start=1)),
        f"Before{needs}:",
        _fenced(page.before),
        "After:",
        _fenced(page.after),
        *facts,
    ]
    return "\n\n".join(parts) + "\n"


def _fenced(text: str, language: str = "python") -> str:
    return f"```{language}\n{text.rstrip()}\n```"


def as_json(pages: Iterable[Page]) -> dict[str, Any]:
    """Pages as plain data, beside the lines that every example begins with."""
    return {"preamble": PREAMBLE, "errors": [_page_as_data(page) for page in pages]}


def _page_as_data(page: Page) -> dict[str, Any]:
    data = {name: getattr(page, name) for name in Page.__dataclass_fields__}
    return {
        **data,
        "exception": page.exception.__name__,
        "message": message_template(page),
        "raised_by": raised_by(page.code),
    }


def _pages() -> tuple[Page, ...]:
    return tuple(CATALOGUE.values())


def search(text: str) -> list[Page]:
    """Pages whose message ``text`` is, holds, or resembles, best first. Empty if nothing fits.

    Line breaks, tracebacks around a message and words that a shell has eaten (those in backticks) do not matter.
    """
    told = _told(text)
    scores = {page.code: _score(page, told) for page in _pages()}
    enough = max(1.0, max(scores.values()) / 3)
    return [
        CATALOGUE[code] for code in sorted(scores, key=lambda code: -scores[code]) if scores[code] > enough
    ]


def is_message_of(page: Page, text: str) -> bool:
    """True if ``text`` names the page's code, or holds all of its message that is always there, or enough of it."""
    told = _told(text)
    first, last = ([piece in told for piece in _pieces(template)] for template in (page.words, page.cure))
    enough = len(_words(" ".join(_pieces(page.words)))) > 2  # "must be" is no message
    return page.code.lower() in told or (all(first) and (enough or all(last)))


def _told(text: str) -> str:
    """Text with its backticks gone, in lower case and on one line."""
    return " ".join(text.replace("`", "").lower().split())


def _pieces(template: str) -> list[str]:
    """What stands between the fields of a template, if it holds words."""
    constants = (_told(constant) for constant, *_ in Formatter().parse(template))
    return [constant.strip(" .,:;()") for constant in constants if _words(constant)]


def _words(text: str) -> set[str]:
    return set(re.findall(r"[a-z0-9_]{2,}", text.lower()))


@cache
def _rarity() -> dict[str, float]:
    """How much a word of a message tells: that of one page alone most, that of all pages nothing."""
    pages = Counter(word for page in _pages() for word in _vocabulary(page))
    return {word: math.log(len(CATALOGUE) / count) for word, count in pages.items()}


@cache
def _vocabulary(page: Page) -> frozenset[str]:
    prose = (page.words, page.cure, page.meaning, *page.when, *page.solutions, _code_in_words(page))
    return frozenset(_words(" ".join(prose)))


def _score(page: Page, told: str) -> float:
    """Weight of what text and page share: most for a piece of the message, least for a word of the page's prose."""
    pieces = [piece for template in (page.words, page.cure) for piece in _pieces(template) if piece in told]
    words = _words(told)
    message = _words(f"{page.words} {page.cure} {_code_in_words(page)}") & words
    shared = ((3.0, _words(" ".join(pieces))), (1.0, message), (0.3, _vocabulary(page) & words))
    weight = sum(factor * sum(_rarity().get(word, 0.0) for word in found) for factor, found in shared)
    longer_is_better = sum(map(len, pieces)) / 20
    return weight + longer_is_better + (100 if page.code.lower() in told else 0)


def _code_in_words(page: Page) -> str:
    return page.code.removeprefix("KDA").replace("-", " ")


def find(code: str) -> Page | None:
    """The page of a code in any case, with or without its ``KDA-``."""
    code = code.upper()
    return CATALOGUE.get(code) or CATALOGUE.get(f"KDA-{code}")


def _codes_like(ctx: click.Context, param: click.Parameter, beginning: str) -> list[str]:
    """For the shell's completion."""
    return [code for code in CATALOGUE if code.startswith(beginning.upper())]


@click.command(
    short_help="Explain an error of this package.",
    epilog="\b\nExamples:\n  kda-cupy errors                          # all codes\n"
    "  kda-cupy errors KDA-STATE-LAYOUT         # or: state-layout\n"
    '  kda-cupy errors --search "`out` must be contiguous"\n'
    "  python serve.py 2>&1 | tail -1 | kda-cupy errors --search -\n"
    "  kda-cupy errors --json | jq -r '.[].code'",
)
@click.argument("code", required=False, shell_complete=_codes_like)
@click.option(
    "--search", "text", metavar="TEXT", help="Find the page of a message; '-' reads it from standard input."
)
@click.option("--json", "json_wanted", is_flag=True, help="Print the pages as JSON.")
@click.option("--preamble", is_flag=True, help="Print the lines that every example begins with.")
def errors(code: str | None, text: str | None, json_wanted: bool, preamble: bool) -> None:
    """Explain an error of this package: what it means, when it happens, what to do.

    Without CODE: every code, and what its message begins with.
    """
    if code is not None and text is not None:
        raise click.UsageError("give CODE or --search TEXT, not both")
    if preamble:
        click.echo(PREAMBLE, nl=False)
        return
    if text is not None:
        text = sys.stdin.read() if text == "-" else text
        pages = search(text)[:_LISTED]
        if not pages:
            raise click.ClickException("no page has a message like that; `kda-cupy errors` lists them all")
        show_whole = is_message_of(pages[0], text)
    else:
        pages = list(_pages()) if code is None else [_page_or_exit(code)]
        show_whole = code is not None
    if json_wanted:
        click.echo(json.dumps(as_json(pages), indent=2))
        return
    if show_whole:
        click.echo(as_text(pages.pop(0)))
        if pages:
            click.echo("\nSimilar messages:")
    width = max((len(page.code) for page in pages), default=0)
    for page in pages:
        click.echo(_cut(f"{page.code:{width}}  {first_line(page)}"))


def _cut(line: str) -> str:
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 4].rsplit(' ', 1)[0]} ..."


def _page_or_exit(code: str) -> Page:
    page = find(code)
    if page is None:
        known = {name.removeprefix("KDA-"): name for name in CATALOGUE}
        near = difflib.get_close_matches(code.upper().removeprefix("KDA-"), known, n=3, cutoff=0.5)
        suggestion = (
            f"did you mean {' or '.join(known[name] for name in near)}?" if near else "see `kda-cupy errors`"
        )
        raise click.UsageError(f"no error has the code {code}; {suggestion}")
    return page
