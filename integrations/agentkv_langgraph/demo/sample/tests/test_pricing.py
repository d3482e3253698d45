from decimal import Decimal

import pytest
from parcel.pricing import discount_percent, net_total, tax, with_shipping


@pytest.mark.parametrize(("count", "percent"), [(1, 0), (9, 0), (10, 5), (50, 10), (99, 10), (100, 15)])
def test_discount_steps(count, percent):
    assert discount_percent(count) == percent


@pytest.mark.parametrize("unit_price", [199, 1_295, 2_999])
@pytest.mark.parametrize("count", [7, 10, 55, 130])
def test_totals_are_rounded_half_up(unit_price, count):
    exact = Decimal(unit_price * count) * (100 - discount_percent(count)) / 100
    assert net_total(unit_price, count) == int(exact + Decimal("0.5"))


def test_shipping_is_free_from_fifty_on():
    assert with_shipping(4_999) == 5_489
    assert with_shipping(5_000) == 5_000


def test_tax_is_rounded_half_up():
    assert tax(1_050) == 200
