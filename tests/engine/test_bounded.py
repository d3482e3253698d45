"""An answer without end and without a line end is given up; whatever else is long arrives."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from agentkv.engine import bounded


class Pieces(httpx.AsyncByteStream):
    """A body of `pieces`; notes whether it was closed."""

    def __init__(self, pieces):
        self.pieces, self.closed = pieces, False

    async def __aiter__(self):
        for piece in self.pieces:
            yield piece

    async def aclose(self):
        self.closed = True


def read(pieces):
    """The body as a client reads it, and the stream below."""
    stream = Pieces(pieces)

    async def run():
        response = httpx.Response(200, stream=stream)
        bounded.bound(response)
        try:
            return await response.aread()
        finally:
            await response.aclose()

    return asyncio.run(run()), stream


@pytest.fixture(autouse=True)
def short_lines(monkeypatch):
    """A hundred bytes instead of megabytes."""
    monkeypatch.setattr(bounded, "LONGEST_LINE_BYTES", 100)


def test_lines_of_any_number_arrive():
    """A long answer is no endless one."""
    body, stream = read([b"data: x\n\n"] * 1000)
    assert b"data: x\n\n" * 1000 == body
    assert stream.closed


@pytest.mark.parametrize("pieces", [[b"a" * 60, b"\n" + b"b" * 90, b"\n"], [b"a" * 100], [b"a" * 200 + b"\n"], []])
def test_a_line_may_be_as_long_as_the_bound(pieces):
    """What counts is what has come since the last line end."""
    assert b"".join(pieces) == read(pieces)[0]


@pytest.mark.parametrize("pieces", [[b"a" * 101], [b"x\n" + b"a" * 60, b"a" * 60], [b"a"] * 500])
def test_a_line_without_end_is_given_up(pieces):
    """With the library's own error, as for a connection that broke."""
    with pytest.raises(httpx.ReadError, match="a line of more than"):
        read(pieces)


def test_a_body_that_is_there_is_left_alone():
    """Answers to other requests are read whole before anybody sees them."""
    response = httpx.Response(200, content=b"a" * 500)
    before = response.stream
    bounded.bound(response)
    assert before is response.stream
