import pytest
from parcel.stock import OutOfStock, Stock


@pytest.fixture
def stock() -> Stock:
    stock = Stock()
    stock.receive("lamp", 5)
    return stock


def test_what_is_reserved_is_no_longer_free(stock):
    stock.reserve("lamp", 3)
    assert stock.free("lamp") == 2


def test_the_last_piece_can_be_reserved(stock):
    stock.reserve("lamp", 5)
    assert stock.free("lamp") == 0


def test_more_than_there_is_cannot_be_reserved(stock):
    with pytest.raises(OutOfStock):
        stock.reserve("lamp", 6)


def test_a_cancelled_reservation_is_free_again(stock):
    stock.reserve("lamp", 2)
    stock.cancel("lamp", 2)
    assert stock.free("lamp") == 5


def test_shipping_takes_from_both_counts(stock):
    stock.reserve("lamp", 4)
    stock.ship("lamp", 4)
    assert (stock.on_hand["lamp"], stock.reserved["lamp"]) == (1, 0)
