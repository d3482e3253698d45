"""Prices: exact arithmetic, names that are found and names that must not be, and files that are wrong."""

from __future__ import annotations

import json
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentkv.budget.prices import Cost, PriceTable, load_prices
from agentkv.core.usage import Usage
from agentkv.errors import ConfigError

MIXED = Usage(
    input_tokens=1000, cached_tokens=600, cache_write_tokens=300, cache_write_long_tokens=100, output_tokens=50, calls=1
)


@pytest.fixture
def table_of(tmp_path):
    """The table of a file with these rows, over the package's own."""

    def make(*rows, **more):
        path = tmp_path / "own.json"
        path.write_text(json.dumps({"rows": list(rows), **more}), encoding="utf-8")
        return load_prices(path)

    return make


def test_every_row_of_the_package_has_source_and_date_and_sane_prices():
    """A price without a date is a rumour; cached reads are never dearer than reads, outputs never cheaper."""
    table = load_prices()
    assert len(table.prices) >= 20
    for price in table.prices:
        assert price.source.startswith("https://")
        assert price.date is not None
        assert price.provider
        assert price.rates is not None
        assert (price.rates.cached_read or price.rates.input) <= price.rates.input <= price.rates.output
        assert price.rates.input <= (price.rates.cache_write or price.rates.input)
        for step in price.above:
            assert step.rates.input > price.rates.input


@pytest.mark.parametrize(
    ("model", "usage", "tier", "usd"),
    [
        ("gpt-4.1", Usage(input_tokens=1000, cached_tokens=600, output_tokens=50, calls=1), "", "0.0015"),
        ("gpt-4.1", Usage(input_tokens=1000, cached_tokens=600, output_tokens=50, calls=1), "default", "0.0015"),
        ("gpt-4.1", Usage(input_tokens=1000, cached_tokens=600, output_tokens=50, calls=1), "priority", "0.002625"),
        ("gpt-4.1", Usage(input_tokens=1000, cached_tokens=600, output_tokens=50, calls=1), "batch", "0.0012"),
        ("gpt-5", Usage(input_tokens=1000, cached_tokens=600, output_tokens=50, calls=1), "flex", "0.0005375"),
        ("gpt-4o-2024-05-13", Usage(input_tokens=1000, cached_tokens=600, calls=1), "", "0.005"),
        ("claude-sonnet-4-5", MIXED, "", "0.00258"),
        ("claude-sonnet-4-5", MIXED, "batch", "0.00129"),
        ("claude-sonnet-4-5", Usage(input_tokens=200_000, calls=1), "", "0.6"),
        ("claude-sonnet-4-5", Usage(input_tokens=200_001, output_tokens=1000, calls=1), "", "1.222506"),
        ("claude-sonnet-4-5", Usage(input_tokens=200_001, cached_tokens=200_001, calls=1), "batch", "0.0600003"),
        ("gemini-2.5-flash", Usage(input_tokens=1_000_000, cached_tokens=1_000_000, calls=1), "", "0.03"),
        ("gpt-4.1", Usage(input_tokens=1, calls=1), "", "0.000002"),
        ("gpt-4.1", Usage(), "", "0"),
    ],
)
def test_cost_is_exact(model, usage, tier, usd):
    """Worked out by hand from the lists: reads, cached reads, writes by lifetime, output, tier, length."""
    assert Decimal(usd) == load_prices().find(model).cost(usage, tier=tier)


def test_tier_without_a_price_has_none():
    """Committed capacity and tiers yet to come are not the standard price."""
    price = load_prices().find("gpt-4.1")
    assert price.cost(MIXED, tier="scale") is None
    assert price.cost(MIXED, tier="flex") is None


def test_prices_of_a_tier_do_not_reach_over_a_length_that_has_its_own(table_of):
    """Where a step does not name the tier's prices nobody knows them; a factor holds everywhere."""
    step = {"input_tokens": 10, "input": 4, "output": 4}
    row = {"model": "m", "input": 2, "output": 2, "tiers": {"batch": 0.5, "fast": {"input": 3, "output": 3}}}
    price = table_of({**row, "above": [step]}).find("m")
    long = Usage(input_tokens=1_000_000, calls=1)
    assert [4, 2, None] == [price.cost(long, tier=tier) for tier in ("", "batch", "fast")]
    price = table_of({**row, "above": [{**step, "tiers": {"fast": {"input": 9, "output": 9}}}]}).find("m")
    assert 9 == price.cost(long, tier="fast")


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("gpt-4.1", "gpt-4.1"),
        (" gpt-4.1 ", "gpt-4.1"),
        ("gpt-4.1-2025-04-14", "gpt-4.1"),
        ("openai/gpt-4.1-2025-04-14", "gpt-4.1"),
        ("gpt-4o-2024-05-13", "gpt-4o-2024-05-13"),
        ("gpt-4o-2024-08-06", "gpt-4o"),
        ("claude-sonnet-4-20250514", "claude-sonnet-4"),
        ("claude-sonnet-4@20250514", "claude-sonnet-4"),
        ("claude-sonnet-4-0", "claude-sonnet-4"),
        ("anthropic.claude-sonnet-4-20250514-v1:0", "claude-sonnet-4"),
        ("anthropic/claude-sonnet-4-5", "claude-sonnet-4-5"),
        ("models/gemini-2.5-pro", "gemini-2.5-pro"),
        ("gemini/gemini-2.5-pro", "gemini-2.5-pro"),
    ],
)
def test_model_is_found_by_name_prefix_or_snapshot(asked, found):
    """What a provider calls one model in different places."""
    assert found == load_prices().find(asked).model


@pytest.mark.parametrize(
    "asked",
    [
        "", "unknown", "gpt-4.10", "gpt-4", "gpt-4.1-turbo", "gpt-4.1-2025-13-14", "gpt-4.1-20251", "GPT-4.1",
        "ft:gpt-4.1:org", "anthropic/gpt-4.1", "azure/gpt-4.1", "us.anthropic.claude-sonnet-4-20250514-v1:0",
        "openai/openai/gpt-4.1", "claude-sonnet-4-5-fast", "smollm2-135m", "gpt-4.1-v1:0", "gpt-4.1:free",
    ],
)  # fmt: skip
def test_other_names_have_no_price(asked):
    """Nothing is guessed, however similar."""
    table = load_prices()
    assert table.find(asked) is None
    assert Cost(usd=None) == table.cost(asked, MIXED)


def test_names_without_end_are_not_kept_for_ever():
    """What was looked for is remembered, of the last names only; the answers stay the same."""
    table = load_prices()
    for number in range(3000):
        assert table.find(f"model-{number}") is None
    assert table.find("gpt-5") is table.find("openai/gpt-5")
    assert len(table._found) <= 1024


def test_own_rows_replace_and_join(table_of):
    """A user's prices come first; the rest of the table stays."""
    table = table_of(
        {"model": "gpt-4.1", "provider": "openai", "input": "1.10", "output": 2, "date": "2026-11-01"},
        {"model": "llama-70b", "aliases": ["llama"], "input": 0.7, "output": 0.8},
    )
    usage = Usage(input_tokens=1_000_000, cached_tokens=500_000, output_tokens=1_000_000, calls=1)
    assert Cost(usd=Decimal("3.10"), price="gpt-4.1 in own.json of 2026-11-01") == table.cost("gpt-4.1", usage)
    assert Decimal("3.10") == table.find("openai/gpt-4.1-2025-04-14").cost(usage)
    assert Decimal("1.5") == table.find("llama").cost(usage)
    assert table.find("gpt-4o") is not None
    assert len(table.prices) == len(load_prices().prices) + 1


def test_own_device_costs_its_hours_or_nothing(table_of):
    """Measured busy time times the price of an hour; without a price of the hour it is free, and says so."""
    free = load_prices().cost("smollm2-135m", MIXED, device_s=36, self_hosted=True)
    assert Cost(usd=Decimal(0), price="self-hosted") == free
    table = table_of({"model": "big", "device_hour": 10}, device_hour=2.5)
    assert Decimal("0.025") == table.cost("smollm2-135m", MIXED, device_s=36, self_hosted=True).usd
    assert Decimal("0.1") == table.cost("big", MIXED, device_s=36, self_hosted=True).usd
    assert Decimal("0.1") == table.cost("big", MIXED, device_s=36).usd
    assert table.cost("other", MIXED, device_s=36).usd is None
    charged = table_of(GOOD, device_hour=2.5).cost("m", MIXED, device_s=36, self_hosted=True)
    assert Cost(usd=Decimal("0.0011"), price="m in own.json") == charged


def test_local_model_with_a_hosted_name_is_not_billed_as_hosted():
    """The device did the work, whatever the model is called."""
    assert Cost(usd=Decimal(0), price="self-hosted") == load_prices().cost("gpt-4.1", MIXED, self_hosted=True)


def test_answer_from_a_response_cache_costs_nothing():
    """And says why."""
    cost = load_prices().cost("gpt-4.1", MIXED, served_locally=True)
    assert Cost(usd=Decimal(0), price="served locally") == cost


def test_yaml_is_read_as_written(tmp_path):
    """No float stands between the file and the Decimal, comments are welcome."""
    path = tmp_path / "own.yaml"
    path.write_text("# mine\nrows:\n  - {model: m, input: 0.1000000000000000000001, output: 1_0}\n", encoding="utf-8")
    rates = load_prices(path).find("m").rates
    assert (Decimal("0.1000000000000000000001"), Decimal(10)) == (rates.input, rates.output)


GOOD = {"model": "m", "input": 1, "output": 2}


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"input": 1, "output": 2}, "row 1: model"),
        ({"model": "m", "output": 2}, "row 1 (m): input"),
        ({"model": "m", "input": 1}, "row 1 (m): output"),
        ({**GOOD, "input": "$2.50"}, "row 1 (m): input='$2.50'"),
        ({**GOOD, "input": -1}, "row 1 (m): input='-1'"),
        ({**GOOD, "output": "NaN"}, "row 1 (m): output='NaN'"),
        ({**GOOD, "output": "Infinity"}, "row 1 (m): output='Infinity'"),
        ({**GOOD, "output": [1]}, "row 1 (m): output=['1']"),
        ({**GOOD, "cached": 1}, "row 1 (m): the field 'cached' is unknown"),
        ({**GOOD, "date": "7.8.2025"}, "row 1 (m): date='7.8.2025'"),
        ({**GOOD, "aliases": "n"}, "row 1 (m): aliases='n'"),
        ({**GOOD, "tiers": {"batch": "half"}}, "row 1 (m): tiers: batch='half'"),
        ({**GOOD, "tiers": {"batch": {"input": 1}}}, "row 1 (m): tiers: batch: output"),
        ({**GOOD, "tiers": 3}, "row 1 (m): tiers='3'"),
        ({**GOOD, "above": [{"input": 1, "output": 1}]}, "row 1 (m): above 1: input_tokens=''"),
        ({**GOOD, "above": {}}, "row 1 (m): above={}"),
        ({**GOOD, "device_hour": 1}, "row 1 (m): device_hour='1'"),
        (["m"], "row 1: ['m'] is no mapping"),
    ],
)
def test_wrong_row_is_named_by_file_row_and_field(table_of, row, named):
    """Whoever mistyped a price can find it."""
    with pytest.raises(ConfigError) as caught:
        table_of(row)
    assert "own.json: " + named in str(caught.value)


def test_one_name_in_two_rows_is_an_error(table_of):
    """Which of them would hold is anybody's guess."""
    with pytest.raises(ConfigError, match="row 2 \\(n\\): 'm' is named by row 1 already"):
        table_of(GOOD, {**GOOD, "model": "n", "aliases": ["m"]})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rows: [", "no YAML or JSON"),
        ("[1, 2]", "no mapping"),
        ("rows: 5", "rows='5'"),
        ("version: 2\nrows: []", "version='2'"),
        ("prices: []", "'prices' is unknown"),
        ("device_hour: much", "device_hour='much'"),
        ("", "no mapping"),
        ("[" * 5000, "no YAML or JSON"),
        ("rows: !!python/object/apply:os.system [x]", "rows"),
    ],
)
def test_wrong_file_is_named(tmp_path, text, said):
    """Nothing in a file is executed, and nothing but a ConfigError comes out."""
    path = tmp_path / "own.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=said) as caught:
        load_prices(path)
    assert str(path) in str(caught.value)


def test_file_that_cannot_be_read_is_named(tmp_path):
    """Missing, a folder, or no text."""
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    for name in ("none.yaml", ".", "bytes"):
        with pytest.raises(ConfigError, match="cannot be read"):
            load_prices(tmp_path / name)


tokens = st.integers(0, 10**6)


@given(
    st.tuples(tokens, tokens, tokens, tokens, tokens),
    st.sampled_from(["gpt-4.1", "claude-haiku-4-5", "gemini-2.5-flash"]),
)
def test_costs_of_calls_add_up_exactly(parts, model):
    """Where no threshold is passed the cost of a sum is the sum of the costs, to the last digit."""
    cached, more, written, long, output = parts
    usage = Usage(
        input_tokens=cached + more + written + long,
        cached_tokens=cached,
        cache_write_tokens=written + long,
        cache_write_long_tokens=long,
        output_tokens=output,
        calls=1,
    )
    price = load_prices().find(model)
    assert price.cost(usage) * 3 == price.cost(usage + usage + usage)
    assert price.cost(usage) >= 0


def test_empty_table_knows_nothing():
    """No row, no price."""
    assert PriceTable(()).find("gpt-4.1") is None
