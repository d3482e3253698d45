"""Prices in cents: volume discounts, shipping and tax."""

import math
from decimal import Decimal

STEPS = ((100, 15), (50, 10), (10, 5))
FREE_SHIPPING_FROM = 5_000
SHIPPING = 490


def discount_percent(count: int) -> int:
    """The volume discount for `count` pieces."""
    for at_least, percent in STEPS:
        if count >= at_least:
            return percent
    return 0


def net_total(unit_price: int, count: int) -> int:
    """Cents for `count` pieces after the volume discount, rounded half up."""
    gross = unit_price * count
    return int(gross * (1 - discount_percent(count) / 100))


def with_shipping(net: int) -> int:
    """Shipping is free from 50.00 on."""
    return net if net > FREE_SHIPPING_FROM else net + SHIPPING


def tax(net: int, percent: Decimal = Decimal("19")) -> int:
    """Tax in cents, rounded half up."""
    return int(Decimal(net) * percent / 100 + Decimal("0.5"))
