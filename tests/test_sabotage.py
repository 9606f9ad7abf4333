"""The table of faults: each stands where it says and has its test; and, in `make test-more`, each is seen."""

import ast
import re
from collections import Counter

import pytest
from sabotage import PACKAGE, ROOT, every, main
from sabotages import FAULTS

LEAST = 40


def test_the_table_stands():
    """So that it does not rot: a line that was changed, or a test that was renamed, is told at once."""
    assert len(FAULTS) >= LEAST
    assert [name for name, times in Counter(fault.name for fault in FAULTS).items() if times > 1] == []
    tests = {}
    for fault in FAULTS:
        text = (ROOT / PACKAGE / fault.file).read_text()
        assert text.count(fault.old) == 1, f"{fault.name}: {fault.old!r} stands {text.count(fault.old)} times"
        ast.parse(text.replace(fault.old, fault.new))
        assert re.fullmatch(r"[A-Z]{0,2}\d+", fault.row), fault.name
        file, function = fault.test.split("::")
        if file not in tests:
            tests[file] = {node.name for node in ast.parse((ROOT / "tests" / file).read_text()).body
                           if isinstance(node, ast.FunctionDef)}
        assert function.partition("[")[0] in tests[file], f"{fault.name}: there is no {fault.test}"


def test_each_kind_of_cut_has_faults():
    sections = Counter(re.match(r"[A-Z]*", fault.row)[0] for fault in FAULTS)
    assert {"C", "D", "E", "P", "T", "X", "Z"} <= sections.keys()


def test_they_are_listed(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["sabotage", "--list"])
    assert main() == 0
    assert len(capsys.readouterr().out.splitlines()) == len(FAULTS)


@pytest.mark.more
def test_each_third_is_seen_by_its_test():
    """All of them take ten minutes, which `python tests/sabotage.py` has."""
    missed = {outcome.fault.name: outcome.said[-2000:] for outcome in every(FAULTS[::3]) if not outcome.seen}
    assert not missed, "\n".join(f"{name}\n{said}" for name, said in missed.items())
