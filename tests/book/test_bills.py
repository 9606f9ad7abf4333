"""The directive that shows a bill: the library's own table, with the names of the page, or a warning with its line."""


import pytest

from shardlab.cost import Serve, ladder
from shardlab.specs import find_card, find_model

EXTENSIONS = ["myst_nb", "computed", "bills"]
NAMES = "```{numbers}\nsmall, card = find_model('llama-3.1-8b'), find_card('h100')\n```\n\n"


def test_a_bill_is_the_table_that_a_notebook_shows(build):
    plan = ladder(find_model("llama-3.1-8b"), find_card("h100"), Serve(concurrency=32))
    html, warnings = build(f"# T\n\n{NAMES}```{{bill}}\nladder(small, card,\n  Serve(concurrency=32))\n```\n")
    assert warnings == ""
    assert plan._repr_html_() in html and "one card is enough" in html


@pytest.mark.parametrize(("expression", "said"), [
    ("ladder(large)", "NameError: name 'large' is not defined"),
    ("small.total", "AttributeError: 'int' object has no attribute '_repr_html_'"),
])
def test_what_is_no_bill_is_a_warning_with_its_line(build, expression, said):
    _, warnings = build(f"# T\n\n{NAMES}```{{bill}}\n{expression}\n```\n")
    assert "index.md:7: WARNING" in warnings and said in warnings
