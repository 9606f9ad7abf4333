"""Numbers with units: right, and honest in their digits."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.specs import units

SIZES = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def test_512_kib_is_524_kb():
    """Numbers that books got wrong, 19 (scaling-book#53): 128 · 2048 · 2 bytes are 512 KiB and 524 kB."""
    assert units.size(128 * 2048 * 2) == "524,288 B = 512 KiB = 524.29 kB"
    assert units.decimal(128 * 2048 * 2, digits=3) == "524.3 kB"


@pytest.mark.parametrize(("n", "decimal", "binary"), [
    (0, "0 B", "0 B"), (1, "1 B", "1 B"), (999, "999 B", "999 B"), (1000, "1 kB", "1000 B"),
    (1024, "1.024 kB", "1 KiB"),
    (999_999, "1.0000 MB", "976.56 KiB"),  # rounds up into the next unit, and is not exactly 1
    (2**30 - 1, "1.0737 GB", "1.0000 GiB"), (2**30, "1.0737 GB", "1 GiB"),
    (671_026_419_200 * 2, "1342.1 GB", "1249.9 GiB"),  # GB is the largest unit: 1342.1 GB reads beside 80 GB cards
    (28672 / 3, "9.5573 kB", "9.3333 KiB"),
])
def test_bytes_in_decimal_and_binary_units(n, decimal, binary):
    assert (units.decimal(n), units.binary(n)) == (decimal, binary)


def test_size_says_a_small_number_once():
    assert units.size(12) == "12 B"


@settings(deadline=None)
@given(n=st.integers(0, 10**15), digits=st.integers(2, 8), write=st.sampled_from([units.decimal, units.binary]))
def test_a_size_can_be_read_back_to_the_digits_shown(n, digits, write):
    text = write(n, digits)
    number, unit = text.split()
    places = len(number.partition(".")[2])
    assert abs(Fraction(number) * SIZES[unit] - n) <= Fraction(SIZES[unit], 2 * 10**places)
    if not number.endswith("0") and places == 0:
        assert Fraction(number) * SIZES[unit] == n
    assert abs(units.parse_bytes(text) - n) <= Fraction(SIZES[unit], 2 * 10**places) + 1


@settings(deadline=None)
@given(k=st.integers(1, 1023), power=st.sampled_from([1, 2, 3]))
def test_whole_numbers_of_a_binary_unit_are_exact(k, power):
    n = k * 1024**power
    assert units.parse_bytes(units.binary(n)) == n
    assert "." not in units.binary(n)


def test_counts_and_times():
    assert units.count(134_515_008) == "134,515,008"
    assert units.count(671_026_419_200) == "671.03e9"
    assert units.count(10**9) == "1e9"
    assert [units.seconds(t) for t in (0, 36e-9, 1.25e-4, 9.999e-4, 1e-3, 12.345, 125)] == [
        "0 ns", "36 ns", "125 µs", "1.00 ms", "1 ms", "12.3 s", "125 s"]


@pytest.mark.parametrize(("text", "n"), [("256 MiB", 2**28), ("80 GB", 80 * 10**9), ("1,024 B", 1024), ("0.5KiB", 512),
                                         (" .5 kB ", 500)])
def test_parse(text, n):
    assert units.parse_bytes(text) == n


@pytest.mark.parametrize("text", ["256", "MiB", "256 MIB", "256 Mb", "-1 GB", "1..2 GB", "1e3 GB", ""])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="is no size: write a number and one of B, kB"):
        units.parse_bytes(text)
