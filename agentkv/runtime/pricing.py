"""What calls come to: the price table, asked so that nothing that goes wrong in it reaches a call.

Covers the cost of a call that has ended and of the worst that one can become. The table is `budget.prices`.
"""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from agentkv.budget.facts import ModelCall
from agentkv.core.usage import Usage
from agentkv.log import failed

if TYPE_CHECKING:
    from agentkv.budget.prices import Cost, PriceTable


class Pricing:
    """Prices calls. `self_hosted`: our own calls run on a device of the user's; `prices` None leaves costs unknown."""

    def __init__(self, prices: PriceTable | None, *, model: str, self_hosted: bool) -> None:
        self._prices = prices
        self._model = model
        self._self_hosted = self_hosted

    def worst_usd(self, usage: Usage, *, device_s: float, foreign: str | None = None, tier: str = "") -> Decimal | None:
        """What a call of our engine (or of the model `foreign`, somewhere else) costs at most; None if nobody knows.

        `tier`: the service tier that it asks for, and may not get.
        """
        model, ours = (self._model, self._self_hosted) if foreign is None else (foreign, False)
        written = replace(usage, cache_write_tokens=usage.input_tokens, cache_write_long_tokens=usage.input_tokens)
        costs = [
            self._cost(model, some, self_hosted=ours, device_s=device_s, tier=one)
            for some in (usage, written)
            for one in {"", tier}
        ]
        known = [cost.usd for cost in costs if cost is not None and cost.usd is not None]
        return max(known) if known else None

    def priced(self, call: ModelCall) -> ModelCall:
        """The fact with what the call came to; without it where pricing fails."""
        cost = self._cost(
            call.model,
            call.usage,
            tier=call.service_tier,
            device_s=call.device_s,
            self_hosted=self._self_hosted,
            served_locally=call.served_locally,
        )
        return call if cost is None else replace(call, cost_usd=cost.usd, price=cost.price)

    def elsewhere(self, model: str, usage: Usage, *, tier: str = "", served_locally: bool = False) -> dict[str, Any]:
        """What a call that ran somewhere else came to, as fields of its fact; {} where nobody knows."""
        cost = self._cost(model, usage, tier=tier, device_s=0.0, self_hosted=False, served_locally=served_locally)
        return {} if cost is None else {"cost_usd": cost.usd, "price": cost.price}

    def _cost(self, model: str, usage: Usage, **about: Any) -> Cost | None:
        if self._prices is None:
            return None
        try:
            return self._prices.cost(model, usage, **about)
        except Exception as error:
            failed("price_failed", model=model, error=repr(error))
            return None
