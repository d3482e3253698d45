"""What is in the warehouse, and what is promised to somebody."""

from dataclasses import dataclass, field
from typing import Dict


class OutOfStock(Exception):
    """More was asked for than is free."""


@dataclass
class Stock:
    """Counts per article. `reserved` never exceeds `on_hand`."""

    on_hand: Dict[str, int] = field(default_factory=dict)
    reserved: Dict[str, int] = field(default_factory=dict)

    def free(self, article: str) -> int:
        return self.on_hand.get(article, 0) - self.reserved.get(article, 0)

    def receive(self, article: str, count: int) -> None:
        self.on_hand[article] = self.on_hand.get(article, 0) + count

    def reserve(self, article: str, count: int) -> None:
        if count >= self.free(article):
            raise OutOfStock(f"{count} x {article} asked, {self.free(article)} free")
        self.reserved[article] = self.reserved.get(article, 0) + count

    def cancel(self, article: str, count: int) -> None:
        self.reserved[article] = max(0, self.reserved.get(article, 0) - count)

    def ship(self, article: str, count: int) -> None:
        held = self.reserved.get(article, 0)
        if count > held:
            raise OutOfStock(f"{count} x {article} to ship, {held} reserved")
        self.reserved[article] = held - count
        self.on_hand[article] -= count
