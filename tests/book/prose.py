"""Find numbers that somebody typed. This book's prose takes its numbers from the library, or quotes them with a source.

A typed number is digits with a unit, a × or a %. Roles, code and formulas are left out. A number is a quotation if the
sentence it stands in has a cite role, or the block quotation around it has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from pages import Block, read

UNITS = [
    "[kKMGTPE]i?B(?:/s)?", "bytes?", "[kMGT]?bits?(?:/s)?", "[kMGTPE]?FLOPS?(?:/s)?", "[numµ]?s", "sec(?:onds?)?",
    "(?:nano|micro|milli)seconds?", "min(?:utes?)?", "h(?:ours?)?", "days?", "%", "per ?cent", "[kMG]?Hz", "[kM]?W",
    "thousand", "million", "billion", "trillion", "tokens?(?:/s| (?:a|per) second)", "°C",
]
NUMBER = r"(?<![\w.-])(?:\d[\d,  ]*)?\.?\d+(?:[eE][+-]?\d+)?"
TYPED = re.compile(
    rf"{NUMBER}(?:\s|-| )?(?:{'|'.join(UNITS)})(?![\w/])"  # 16 KiB, 450 GB/s, 85 %
    rf"|{NUMBER}\s?B(?:/s)?(?![\w/-])(?<!\dB)"  # 16 B are bytes; 70B is the name of a model
    rf"|{NUMBER}\s?[×x](?![\w-])(?!\s*[\d(\[$*#])"  # 2×, 1.4x, 3 × as long; 1 × 1 × 8 is a product
    r"|×\s?\d+(?:\.\d+)?(?!\s*[\d×])(?=\s*(?:faster|slower|more|less|as|the))"  # ×2 faster
)
ROLE = re.compile(r"\{[\w:.+-]+\}(`+).+?\1", re.S)
CITE = re.compile(r"\{(?:foot)?cite[\w:]*\}`")
HIDDEN = [
    re.compile(r"(?<!\\)\$\$.+?\$\$", re.S), re.compile(r"(?<![\\$])\$[^$\n]+(?:\n[^$\n]+)?\$"),
    re.compile(r"(`+).+?\1", re.S), re.compile(r"\]\([^)]*\)"), re.compile(r"<https?:[^>]*>"), re.compile(r"https?://\S+"),
]
SENTENCE = re.compile(r"(?<=[.!?])[)”\"*_]*\s+(?=[A-Z“\"*(\[{])|\n(?=\s*(?:[-*+]|\d+\.|\|)\s)")
STAND_IN = "#"
PRESENT = re.compile(r"\b(?:today(?:['’]s)?|nowadays|currently|at present|these days|the (?:latest|newest))\b", re.I)
YEAR = re.compile(r"\b20\d\d\b")


def sentences(block: Block) -> Iterable[tuple[int, str]]:
    """(line, sentence) of a block of prose; a block quotation is one sentence, a row of a table is one."""
    text = block.text
    ends = [] if block.quoted else [match.span() for match in SENTENCE.finditer(keep_length(text, ROLE))]
    starts = [0, *(end for _, end in ends)]
    stops = [*(start for start, _ in ends), len(text)]
    for start, stop in zip(starts, stops, strict=True):
        yield block.line + text.count("\n", 0, start), text[start:stop]


def keep_length(text: str, pattern: re.Pattern[str]) -> str:
    """The text with what matches overwritten, line breaks and length kept."""
    return pattern.sub(lambda match: re.sub(r"[^\n]", "X", match[0]), text)


def visible(sentence: str) -> str:
    """The sentence without roles, code, formulas and addresses."""
    sentence = ROLE.sub(STAND_IN, sentence)
    for pattern in HIDDEN:
        sentence = pattern.sub(" ", sentence)
    return sentence


def typed_numbers(text: str) -> list[tuple[int, str]]:
    """(line, number) of every typed number in a page's prose."""
    found = []
    for block in read(text).blocks:
        for line, sentence in sentences(block):
            if not CITE.search(sentence):
                found += [(line, match[0].strip()) for match in TYPED.finditer(visible(sentence))]
    return found


def problems(name: str, text: str, allowed: list[dict[str, str]]) -> list[str]:
    """What is wrong with a page's numbers. `allowed` has entries with `page`, `number` and `why`."""
    here = {entry["number"]: entry for entry in allowed if entry["page"] == name}
    typed = typed_numbers(text)
    wrong = [f"{name}:{line}: {number!r} is typed: compute it ({{num}}), cite it in the sentence, or allow it, with why"
             for line, number in typed if number not in here]
    return wrong + [f"{name}: {number!r} is allowed and no longer there" for number in here
                    if number not in {number for _, number in typed}]


def undated(text: str) -> list[tuple[int, str]]:
    """(line, word) of every sentence that speaks of the present and doesn't say when that was: a year, or a cite."""
    found = []
    for block in read(text).blocks:
        for line, sentence in sentences(block):
            word = PRESENT.search(visible(sentence))
            if word and not YEAR.search(sentence) and not CITE.search(sentence):
                found.append((line, word[0]))
    return found
