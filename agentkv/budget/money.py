"""Money as people read it: never 0.00 for something, never a sum that hides a call without a price."""

from __future__ import annotations

from decimal import ROUND_HALF_UP, Decimal

_CENT = Decimal("0.01")
_DIGITS_SHOWN = 2


def format_usd(amount: Decimal | None) -> str:
    """As in "$1.23" or "$0.0042"; "$0.00" for nothing at all, "no price" for None."""
    if amount is None:
        return "no price"
    size = abs(amount)
    if not size:
        return "$0.00"
    if size >= 1:
        text = f"{size.quantize(_CENT, ROUND_HALF_UP):,f}"
    else:
        first = -size.adjusted()  # where the first digit that is not 0 stands behind the point
        text = f"{size.quantize(Decimal(1).scaleb(-max(_DIGITS_SHOWN, first + 1)), ROUND_HALF_UP):f}"
    return f"-${text}" if amount < 0 else f"${text}"


def format_cost(cost_usd: Decimal | None, unpriced: int) -> str:
    """A sum of money, with the number of calls that it does not hold because nobody knows their price."""
    calls = f"{unpriced:,} call{'' if unpriced == 1 else 's'} without a price"
    if cost_usd is None:
        return f"no price is known ({calls})" if unpriced else "nothing"
    return f"{format_usd(cost_usd)} and {calls}" if unpriced else format_usd(cost_usd)
