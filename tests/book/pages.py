"""Read a MyST page just far enough to check it: headings, directives with their options, and prose with its line.

Pure: text in, plain objects out. Directives nest as MyST nests them, by longer fences around shorter ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

FENCE = re.compile(r"^\s*(`{3,}|:{3,}|~{3,})\s*(?:\{([\w:-]+)\})?(.*)$")
OPTION = re.compile(r"^\s*:([\w-]+):\s*(.*)$")
HEADING = re.compile(r"^(#{1,6})\s+(.*)$")
CODE = {"numbers", "literalinclude", "code-block", "code", "math", "mermaid", "bibliography", "toctree"}


@dataclass
class Directive:
    """```{name} argument, its options and the lines between its fences; a plain code fence has no name."""

    name: str
    argument: str
    line: int
    options: dict[str, str] = field(default_factory=dict)
    body: list[str] = field(default_factory=list)
    inside: list[str] = field(default_factory=list)  # the names of the directives around it

    @property
    def is_code(self) -> bool:
        """Whether its body is something else than prose."""
        return not self.name or self.name in CODE


@dataclass
class Block:
    """Neighbouring lines of prose: a paragraph, a list, a table, a heading."""

    line: int
    text: str
    quoted: bool  # in a block quotation


@dataclass
class Page:
    """A page in the order in which it is read."""

    headings: list[tuple[int, int, str]]  # line, level, text
    directives: list[Directive]
    blocks: list[Block]

    def all(self, *names: str) -> list[Directive]:
        """The directives of those names."""
        return [directive for directive in self.directives if directive.name in names]


def read(text: str) -> Page:
    """The parts of a page's source."""
    page = Page([], [], [])
    stack: list[tuple[str, Directive]] = []
    prose: list[tuple[int, str]] = []
    for number, line in enumerate(without_front_matter(text).splitlines(), start=1):
        fence, inner = FENCE.match(line), stack[-1][1] if stack else None
        if stack and closes(line, stack[-1][0]):
            stack.pop()
            prose.append((number, ""))
        elif fence and not (inner and inner.is_code):
            opened = Directive(fence[2] or "", fence[3].strip(), number, inside=[d.name for _, d in stack])
            page.directives.append(opened)
            stack.append((fence[1], opened))
            title = "" if opened.is_code else opened.argument
            prose += [(number, ""), (number, title), (number, "")]
        elif inner and not inner.body and (option := OPTION.match(line)):
            inner.options[option[1]] = option[2]
        else:
            if inner:
                inner.body.append(line)
            if not (inner and inner.is_code):
                prose.append((number, line))
    page.headings = [(n, len(found[1]), found[2]) for n, line in prose if (found := HEADING.match(line))]
    page.blocks = list(blocks(prose))
    return page


def without_front_matter(text: str) -> str:
    """The text with its YAML front matter and its HTML comments blanked, line for line."""
    def blank(match: re.Match[str]) -> str:
        return "\n" * match[0].count("\n")

    text = re.sub(r"\A---\n.*?\n---\n", blank, text, flags=re.S)
    return re.sub(r"<!--.*?-->", blank, text, flags=re.S)


def closes(line: str, fence: str) -> bool:
    """Whether a line closes that fence: the same sign, at least as often, and nothing else."""
    bare = line.strip()
    return len(bare) >= len(fence) and set(bare) == {fence[0]}


def blocks(lines: list[tuple[int, str]]) -> Iterator[Block]:
    """Runs of lines that are not empty."""
    run: list[tuple[int, str]] = []
    for number, line in [*lines, (0, "")]:
        if line.strip():
            run.append((number, line))
        elif run:
            yield Block(run[0][0], "\n".join(line for _, line in run), run[0][1].lstrip().startswith(">"))
            run = []
