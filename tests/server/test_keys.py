"""API keys: where they come from, who is let in, and what each tenant has of its own."""

from __future__ import annotations

import hashlib
import itertools
import sqlite3
from datetime import datetime

import openai
import pytest

from agentkv import AgentKV, Budget, Caller, HintKind, Request, Sampling, ScriptedEngine, log
from agentkv.budget.database import sqlite_url
from agentkv.clock import ManualClock
from agentkv.core.hint import Hint, ToolFacts
from agentkv.errors import ConfigError
from agentkv.hints.wire import WireHint
from agentkv.server.keys import Keys

ALICE, BOB = "sk-alice-1234", "sk-bob-12345"
LONG = "The quick brown fox jumps over the lazy dog. " * 8
ASK = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 2, "temperature": 0}


@pytest.fixture
def key_file(tmp_path):
    def write(text: str, mode: int = 0o600):
        path = tmp_path / "keys.toml"
        path.write_text(text)
        path.chmod(mode)
        return path

    return write


def test_keys_are_read_from_file_and_environment(key_file):
    """A secret, its digest, or the name of a variable; budgets and salts; none at all is None."""
    digest = hashlib.sha256(b"sk-carol-123").hexdigest()
    path = key_file(
        f'[keys.alice]\nkey = "{ALICE}"\ntokens = 100\nusd = "0.5"\nsalt = "s"\n'
        f'[keys.bob]\nkey_env = "BOB"\n[keys.carol]\nkey_sha256 = "{digest}"\n'
    )
    keys = Keys.read(path, {"BOB": BOB, "AGENTKV_API_KEY": "sk-default-1", "AGENTKV_API_KEYS": "dave=sk-dave-12345"})
    assert ["alice", "bob", "carol", "default", "dave"] == [key.name for key in keys.all]
    alice = keys.find(f"Bearer {ALICE}")
    assert ("alice", "s", Budget(tokens=100, usd="0.5")) == (alice.name, alice.salt, alice.budget)
    assert ["bob", "carol", "default", "dave"] == [
        keys.find(f"bearer {secret}").name for secret in (BOB, "sk-carol-123", "sk-default-1", "sk-dave-12345")
    ]
    assert len({key.salt for key in keys.all}) == 5
    assert not any(secret in repr(keys.all) for secret in (ALICE, BOB, "sk-dave"))
    for wrong in ("", "Bearer", "Bearer ", f"Basic {ALICE}", f"Bearer {ALICE}x", ALICE, "Bearer \udcff"):
        assert keys.find(wrong) is None
    assert Keys.read(None, {}) is None


BAD_FILES = [
    "not toml",
    "",
    "[other]\na = 1",
    '[keys]\nalice = "sk-alice-1234"',
    '[keys.alice]\nkey = "short"',
    "[keys.alice]\nsalt = 's'",
    '[keys.alice]\nkey = "sk-alice-1234"\nkey_env = "A"',
    '[keys.alice]\nkey = "sk-alice-1234"\nquota = 5',
    '[keys.alice]\nkey = "sk-alice-1234"\ntokens = -5',
    '[keys.alice]\nkey = "sk-alice-1234"\nsalt = ""',
    '[keys."a/b"]\nkey = "sk-alice-1234"',
    '[keys.alice]\nkey_sha256 = "12"',
    '[keys.alice]\nkey_env = "MISSING"',
    '[keys.alice]\nkey = "sk-alice-1234"\n[keys.bob]\nkey = "sk-alice-1234"',
    '[keys.default]\nkey = "sk-other-1234"',
    '[keys.alice]\nkey = "sk-alice-1234"\ntokens = 5\nper = "week"',
    '[keys.alice]\nkey = "sk-alice-1234"\nper = "day"',
    '[keys.alice]\nkey = "sk-alice-1234"\nretries = 5',
    '[keys.alice]\nkey = "sk-alice-1234"\ntokens = 5\nzone = "UTC"',
    '[keys.alice]\nkey = "sk-alice-1234"\ntokens = 5\nper = "day"\nzone = "Mars/Olympus"',
    '[keys.alice]\nkey = "sk-alice-1234"\ntokens = 5\nper = "day"\nzone = 3',
]


@pytest.mark.parametrize("text", BAD_FILES, ids=str)
def test_bad_keys_are_refused_without_their_secret(key_file, text):
    """A sentence that names the key; a name with a slash could pass for another tenant's task."""
    with pytest.raises(ConfigError) as caught:
        Keys.read(key_file(text), {"AGENTKV_API_KEY": "sk-default-1"})
    assert "sk-" not in str(caught.value)
    with pytest.raises(ConfigError):
        Keys.read(key_file(text).with_name("missing.toml"), {})


def test_a_key_file_that_others_can_read_is_told(key_file):
    """One warning, and the keys work."""
    before = log.counters["key_file_readable"]
    assert Keys.read(key_file(f'[keys.alice]\nkey = "{ALICE}"\n', mode=0o644), {})
    assert before + 1 == log.counters["key_file_readable"]


def keys_of(text: str, key_file) -> Keys:
    keys = Keys.read(key_file(text), {})
    assert keys is not None
    return keys


TWO = f'[keys.alice]\nkey = "{ALICE}"\n[keys.bob]\nkey = "{BOB}"\n'


def test_without_a_key_nothing_but_health_answers(scripted_place, key_file):
    """401 in OpenAI's shape, before the body is read; openai raises its own error."""
    place = scripted_place("x", keys=keys_of(TWO, key_file))
    assert 200 == place.http.get("/health").status_code
    for method, path in (
        ("GET", "/v1/models"),
        ("GET", "/metrics"),
        ("POST", "/v1/responses"),
        ("POST", "/v1/nothing"),
    ):
        response = place.http.request(method, path, content=b"{")
        assert (401, "invalid_api_key") == (response.status_code, response.json()["error"]["code"])
        assert "Bearer" == response.headers["www-authenticate"]
    with pytest.raises(openai.AuthenticationError):
        place.openai("sk-nobody").models.list()
    assert "x" == place.openai(BOB).chat.completions.create(model="scripted", **ASK).choices[0].message.content
    assert [] == [request for request in place.kv.engine.requests if request.caller.task != "bob/default"]


def test_tenants_have_tasks_sessions_and_salts_of_their_own(scripted_place, key_file):
    """The same header from two tenants names two tasks; neither can name the other's."""
    place = scripted_place(*"xxxx", keys=keys_of(TWO, key_file))
    for key, task in ((ALICE, "job"), (BOB, "job"), (BOB, "alice/job")):
        client = place.openai(key)
        client.chat.completions.create(
            model="scripted", **ASK, extra_headers={"x-agentkv-task": task, "x-agentkv-session": "s"}
        )
    requests = place.kv.engine.requests
    assert ["alice/job", "bob/job", "bob/alice/job"] == [request.caller.task for request in requests]
    assert ["alice/s", "bob/s", "bob/s"] == [request.session for request in requests]
    assert ["key:alice", "key:bob", "key:bob"] == [request.salt for request in requests]


def test_k5_no_tenant_reuses_or_reaches_anothers_kv(engine_place, key_file):
    """The same prompt: the same tenant reuses, another does not, whatever salt it sends; equal salts share on purpose."""
    text = TWO + '[keys.carol]\nkey = "sk-carol-123"\nsalt = "key:alice"\n'
    place = engine_place(keys=keys_of(text, key_file))

    def cached(key: str, **more) -> int:
        usage = place.openai(key).chat.completions.create(model=place.kv.engine.model, **ASK, **more).usage
        return usage.prompt_tokens_details.cached_tokens

    assert 0 == cached(ALICE)
    assert cached(ALICE) > 300
    assert cached(ALICE, extra_headers={"x-agentkv-task": "another"}) > 300
    assert 0 == cached(BOB)
    assert cached("sk-carol-123") > 300
    for field in ("cache_salt", "salt"):
        with pytest.raises(openai.BadRequestError, match=field):
            cached(BOB, extra_body={field: "key:alice"})
    assert cached(BOB, extra_headers={"x-agentkv-salt": "key:alice"}) > 300  # its own, from before
    with pytest.raises(openai.BadRequestError):
        place.openai(BOB).responses.create(
            model=place.kv.engine.model, input="x", max_output_tokens=1,
            previous_response_id=place.openai(ALICE).responses.create(
                model=place.kv.engine.model, input="x", max_output_tokens=1
            ).id,
        )  # fmt: skip


def test_k5_salts_that_nearly_collide_are_apart(engine_place, key_file):
    """("ab", "c") is not ("a", "bc"): names and salts are framed by their lengths."""
    secrets = itertools.count(10_000)
    text = "".join(
        f'[keys.k{n}]\nkey = "sk-{next(secrets)}-x"\nsalt = "{salt}"\n' for n, salt in enumerate(["ab", "a", "abc"])
    )
    place = engine_place(keys=keys_of(text, key_file))
    cached = [
        place.openai(f"sk-{10_000 + n}-x").chat.completions.create(model=place.kv.engine.model, **ASK) for n in range(3)
    ]
    assert [0, 0, 0] == [answer.usage.prompt_tokens_details.cached_tokens for answer in cached]


def test_k5_salts_hold_on_disk_and_after_a_restart(folder_of, tmp_path):
    """Through every tier: the tenant finds its context again in the next process, another one with the same prompt does not."""

    def cached(kv: AgentKV, salt: str, task: str) -> int:
        request = Request(prompt=LONG, sampling=Sampling(max_tokens=2), caller=Caller(task=task), salt=salt)
        return kv.submit(request).result(30).usage.cached_tokens

    options = {"device": "cpu", "dtype": "float32", "device_memory": "2MiB", "host_memory": "2MiB", "ledger": "memory"}
    options |= {"disk": tmp_path / "disk", "disk_memory": "64MiB", "persist": True, "context": None}
    with AgentKV.local(str(folder_of()), **options) as kv:
        assert [0, 0] == [cached(kv, "key:alice", "alice/job"), cached(kv, "key:bob", "bob/other")]
        assert cached(kv, "key:alice", "alice/job") > 300
    with AgentKV.local(str(folder_of()), **options) as kv:
        assert cached(kv, "key:alice", "alice/job") > 300
        assert [0, 0] == [cached(kv, salt, "alice/job") for salt in ("key:carol", "")]


def test_a_keys_budget_is_that_of_all_its_tasks(scripted_place, key_file):
    """429 at once, over whichever task; the other tenant goes on; unknown and parallel calls cannot pass either."""
    text = f'[keys.alice]\nkey = "{ALICE}"\nmodel_calls = 2\n[keys.bob]\nkey = "{BOB}"\n'
    place = scripted_place(*"xxxx", keys=keys_of(text, key_file))
    alice, bob = place.openai(ALICE), place.openai(BOB)
    for task in ("one", "two"):
        alice.chat.completions.create(model="scripted", **ASK, extra_headers={"x-agentkv-task": task})
    for stream in (False, True):
        with pytest.raises(openai.RateLimitError) as caught:
            alice.chat.completions.create(
                model="scripted", **ASK, stream=stream, extra_headers={"x-agentkv-task": "three"}
            )
        assert "budget_exceeded" == caught.value.code
    assert "x" == bob.chat.completions.create(model="scripted", **ASK).choices[0].message.content


# -- budgets that go on, and that begin anew


def at(moment: str) -> int:
    """The milliseconds of a moment with its offset."""
    return round(datetime.fromisoformat(moment).timestamp() * 1000)


@pytest.fixture
def server_of(place_of, key_file):
    """`server_of(text, ledger, moment)`: the next process that serves with these keys, and its clock."""

    def make(text: str, ledger: str, moment: str = "2026-06-01T12:00:00+00:00"):
        clock = ManualClock(wall_ms=at(moment))
        kv = AgentKV.with_engine(ScriptedEngine(itertools.repeat("x")), ledger=ledger, clock=clock)
        return place_of(kv, keys=keys_of(text, key_file)), clock

    return make


@pytest.fixture
def ledger(tmp_path):
    """A database."""
    return sqlite_url(tmp_path / "ledger.sqlite")


def call(place, key: str = ALICE, task: str = "one") -> str:
    """A call, or the message with which it is refused."""
    try:
        place.openai(key).chat.completions.create(model="scripted", **ASK, extra_headers={"x-agentkv-task": task})
    except openai.RateLimitError as error:
        return str(error)
    return "ok"


def test_a_keys_budget_goes_on_after_a_restart(server_of, ledger):
    """What a process before spent is spent, over all tasks and whatever ended; a larger budget in the file is more."""
    text = f'[keys.alice]\nkey = "{ALICE}"\nmodel_calls = 3\n[keys.bob]\nkey = "{BOB}"\nmodel_calls = 1\n'
    first, _ = server_of(text, ledger)
    assert ["ok", "ok"] == [call(first), call(first, task="two")]
    first.kv.finish("alice/one")
    first.close()
    second, _ = server_of(text, ledger, "2030-01-01T00:00:00+00:00")
    assert "ok" == call(second, task="one")
    assert "'key:alice' may spend 3 model_calls: 3 are used" in call(second)
    assert "ok" == call(second, BOB)
    second.close()
    third, _ = server_of(text.replace("= 3", "= 4"), ledger)
    assert "ok" == call(third)
    assert "4 are used" in call(third)
    third.kv.budgets.grant("type:key:alice", model_calls=1)
    assert "ok" == call(third)


def test_two_servers_with_one_ledger_hold_a_key_together(server_of, ledger):
    """Neither can spend what the other one has."""
    text = f'[keys.alice]\nkey = "{ALICE}"\nmodel_calls = 3\n'
    one, two = server_of(text, ledger)[0], server_of(text, ledger)[0]
    assert ["ok", "ok", "ok"] == [call(one), call(two), call(one)]
    assert "3 are used" in call(two)
    assert "3 are used" in call(one)


def test_without_a_database_a_budget_is_of_the_process(server_of):
    """As docs/serve.md says."""
    text = f'[keys.alice]\nkey = "{ALICE}"\nmodel_calls = 1\n'
    for _ in range(2):
        place, _clock = server_of(text, "memory")
        assert "ok" == call(place)
        assert "1 are used" in call(place)


MIDNIGHTS = [
    ("Asia/Shanghai", "day", "2026-03-01T23:59:59+08:00", 1, "2026-03-01"),
    ("America/New_York", "day", "2026-03-08T23:59:59-04:00", 1, "2026-03-08"),  # 23 hours long
    ("America/New_York", "day", "2026-11-01T23:59:59-05:00", 1, "2026-11-01"),  # 25 hours long
    ("Pacific/Apia", "day", "2011-12-29T23:59:59-10:00", 1, "2011-12-29"),  # the day after was left out
    ("Asia/Shanghai", "month", "2026-02-28T23:59:59+08:00", 1, "2026-02"),
    ("Pacific/Apia", "month", "2011-12-31T23:59:59+14:00", 1, "2011-12"),
]


@pytest.mark.parametrize("kept", ["memory", "sqlite"])
@pytest.mark.parametrize(("zone", "per", "last", "later_s", "named"), MIDNIGHTS)
def test_l4_a_days_budget_ends_at_midnight_of_its_zone(  # noqa: PLR0917  cases
    server_of, tmp_path, kept, zone, per, last, later_s, named
):
    """Spent up to the last second; the next second is a new day, before a restart and after. The refusal names the zone."""
    url = "memory" if kept == "memory" else sqlite_url(tmp_path / "ledger.sqlite")
    text = f'[keys.alice]\nkey = "{ALICE}"\nmodel_calls = 1\nper = "{per}"\nzone = "{zone}"\n'
    place, clock = server_of(text, url, last)
    assert "ok" == call(place)
    assert f"'key:alice in {named} ({zone})' may spend 1 model_calls" in call(place)
    clock.advance(later_s)
    assert "ok" == call(place)
    assert "1 are used" in call(place)
    clock.step_wall(-5000)
    assert "1 are used" in call(place)  # a clock that is set back begins nothing anew
    if kept == "sqlite":
        place.close()
        again, _ = server_of(text, url, last)
        assert f"in {named} ({zone})" in call(again)


@pytest.mark.parametrize(("start", "hours"), [("2026-03-08T00:00:00-05:00", 23), ("2026-11-01T00:00:00-04:00", 25)])
def test_l4_a_day_may_have_23_or_25_hours(server_of, start, hours):
    """Its budget lasts exactly as long."""
    text = f'[keys.alice]\nkey = "{ALICE}"\nmodel_calls = 1\nper = "day"\nzone = "America/New_York"\n'
    place, clock = server_of(text, "memory", start)
    assert "ok" == call(place)
    clock.advance(hours * 3600 - 1)
    assert "1 are used" in call(place)
    clock.advance(1)
    assert "ok" == call(place)


@pytest.mark.parametrize("way", ["hints", "kv_hints"])
def test_a_tool_that_is_told_counts_in_the_day_in_which_it_began(server_of, way):
    """Also where no model call has begun the new day."""
    text = f'[keys.alice]\nkey = "{ALICE}"\ntool_calls = 1\nper = "day"\nzone = "UTC"\n'
    place, clock = server_of(text, "memory", "2026-06-01T23:59:59+00:00")

    def told(number: int) -> str:
        call = ToolFacts(call_id=f"c{number}", tool="make")
        made = Hint(id=f"h{number}", at_s=0, ts_ms=0, kind=HintKind.TOOL_START, task="job", call=call)
        hint, headers = WireHint.of(made), {"authorization": f"Bearer {ALICE}", "x-agentkv-task": "job"}
        if way == "hints":
            answer = place.http.post("/v1/agentkv/hints", json=hint.to_json(), headers=headers)
            return answer.json()["receipts"][0]["outcome"]
        body = {"model": "scripted", **ASK, "kv_hints": hint.to_envelope()}
        return place.http.post("/v1/chat/completions", json=body, headers=headers).headers["x-agentkv-hints"]

    assert ["applied", "failed"] == [told(1), told(2)]
    clock.advance(1)
    assert ["applied", "failed"] == [told(3), told(4)]


def test_a_call_counts_in_the_day_in_which_it_began(server_of):
    """It ends after midnight: the new day has all of its budget."""
    text = f'[keys.alice]\nkey = "{ALICE}"\nmodel_calls = 1\nper = "day"\nzone = "UTC"\n'
    place, clock = server_of(text, "memory", "2026-06-01T23:59:59+00:00")
    with place.openai(ALICE).chat.completions.create(model="scripted", **ASK, stream=True) as stream:
        pool = place.kv.budgets.pool("key:alice")
        next(iter(stream))
        clock.advance(2)
        assert "ok" == call(place)
    assert 1 == pool.used.model_calls
    assert "in 2026-06-02 (UTC)" in call(place)


def test_a_ledger_that_cannot_be_used_refuses_calls_for_now(server_of, tmp_path):
    """503 without the database's name, and nothing is started; keys without a budget go on."""
    path = tmp_path / "ledger.sqlite"
    text = f'[keys.alice]\nkey = "{ALICE}"\nmodel_calls = 9\n[keys.bob]\nkey = "{BOB}"\n'
    place, _ = server_of(text, sqlite_url(path))
    assert "ok" == call(place)
    with sqlite3.connect(path) as other:
        other.execute("UPDATE agentkv_schema SET version = version + 1000")
    with pytest.raises(openai.InternalServerError) as caught:
        call(place)
    assert (503, "ledger_unavailable") == (caught.value.status_code, caught.value.code)
    assert str(path) not in str(caught.value)
    assert "ok" == call(place, BOB)
    with sqlite3.connect(path) as other:
        other.execute("UPDATE agentkv_schema SET version = version - 1000")
    assert "ok" == call(place)
