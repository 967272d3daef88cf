"""Sizes and numbers, as they are read and shown."""

import pytest

from dejax.errors import UsageError
from infer.units import (
    format_bytes,
    format_count,
    format_decimal_bytes,
    format_number,
    format_percent,
    parse_bytes,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("17", 17),
        ("17B", 17),
        ("512MiB", 512 * 2**20),
        ("512mib", 512 * 2**20),
        ("1.5GB", 1_500_000_000),
        ("2 TiB", 2 * 2**40),
        ("all", None),
    ],
)
def test_parse_bytes(text, size):
    assert parse_bytes(text) == size
    assert parse_bytes(format_bytes(size)) == (size and pytest.approx(size, rel=5e-3))


@pytest.mark.parametrize("text", ["", "-1", "MiB", "1M", "1e6", "nan", "inf", "1.MiB", "ALL", "１"])
def test_parse_bytes_refuses(text):
    with pytest.raises(UsageError, match="is not a size; expected"):
        parse_bytes(text)


def test_a_size_beyond_any_machine_is_refused():
    with pytest.raises(UsageError, match="400 digits"):
        parse_bytes("9" * 400)


def test_one_form_of_each_number():
    assert [format_bytes(n) for n in (None, 0, 5, 1024, 18 * 2**20)] == [
        *("all", "0", "5 B", "1 KiB", "18 MiB")
    ]
    assert format_bytes(28_789_702_656) == "26.8 GiB"
    assert format_decimal_bytes(17_301_504) == "17.3 MB"
    assert format_count(15_706_484_224) == "15.7 B"
    assert [format_number(x) for x in (0.0, 12.345678, 12345.6, 1e-7)] == [
        *("0", "12.35", "12346", "1e-07")
    ]


@pytest.mark.parametrize("share, text", [(0.82443, "82.4 %"), (1.0, "100.0 %"), (None, "-")])
def test_percent(share, text):
    assert format_percent(share) == text
