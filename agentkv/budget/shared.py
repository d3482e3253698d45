"""A tally that several processes share, in the ledger's database: every step is one committed transaction.

Covers SQLite (one writer at a time) and PostgreSQL (a lock on the task's row), leases, and what a killed process had
set aside. Its tables are made where they are missing. A commit survives a killed process; on SQLite in WAL mode the last
ones may be lost with the machine's power.

What a process sets aside is its for a lease, which it renews while it lives. What was set aside by one that died is
given back when somebody needs it and the lease is over; until then it counts as spent. Leases run by the database's
clock: for SQLite that is the time since the machine was started, which no person and no time server moves.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from agentkv.budget import tallytext
from agentkv.budget.limits import Budget, Spent
from agentkv.budget.links import WAIT_S, Link, linked, told
from agentkv.budget.tally import Tally
from agentkv.budget.waits import Waits
from agentkv.errors import LedgerError
from agentkv.log import count, failed

if TYPE_CHECKING:
    from agentkv.budget.database import Database

LEASE_S = 30.0
_LOOK_S = 0.02
_ROW = (
    "SELECT limits, sums, age_ms, seen_ms, (SELECT max(version) FROM agentkv_schema) "
    "FROM agentkv_budget WHERE digest = :digest"
)


class SharedPurses:
    """The shared tallies of one database. Thread-safe; a process that was forked makes a connection of its own."""

    def __init__(
        self, database: Database, *, lease_s: float = LEASE_S, now_ms: Callable[[], int] | None = None
    ) -> None:
        self._database = database
        self._lease_ms = round(lease_s * 1000)
        self._own_now_ms = now_ms
        self._lock = threading.RLock()
        self._link: Link | None = None
        self._pid = 0
        self._owner = ""
        self._ids = itertools.count()
        self._open: set[str] = set()
        self._later: list[tuple[SharedPurse, str, Spent]] = []
        self._keeper: threading.Thread | None = None
        self._wake = threading.Event()
        self._closed = False

    def of(self, task: str, budget: Budget | None) -> SharedPurse:
        """The task's tally. The budget replaces its limits at the first step; None leaves what others set."""
        return SharedPurse(self, task, budget)

    # -- transactions

    def begin(self, wait_s: float) -> Link:
        """Begin one, with the lock held until `end`. Raises LedgerError, with nothing held, if that is not possible."""
        self._lock.acquire()
        try:
            link = self._linked()
            link.begin(wait_s)
        except BaseException as error:
            self._lock.release()
            raise told(error, self._database.name) from error
        return link

    def end(self, *, well: bool) -> None:
        """Commit or take back. Raises LedgerError if the commit failed; then nothing has changed."""
        link = self._link
        assert link is not None
        try:
            if well:
                link.commit()
            else:
                link.rollback()
        except BaseException as error:
            self.undo()
            raise told(error, self._database.name) from error
        finally:
            self._lock.release()

    def undo(self) -> None:
        """Take back as far as that is still possible."""
        try:
            if self._link is not None:
                self._link.rollback()
        except Exception as error:
            failed("budget_rollback_failed", error=repr(error))

    def run(self, sql: str, **values: Any) -> Sequence[Any]:
        """A statement in the transaction."""
        assert self._link is not None
        try:
            return self._link.run(sql, values)
        except BaseException as error:
            raise told(error, self._database.name) from error

    def now_ms(self) -> int:
        """The clock of leases."""
        assert self._link is not None
        return self._link.now_ms() if self._own_now_ms is None else self._own_now_ms()

    @property
    def owner(self) -> str:
        """This process, in the tables."""
        return self._owner

    @property
    def row_lock(self) -> str:
        """What a SELECT of a task's row ends in."""
        return "" if self._link is None else self._link.row_lock

    def _linked(self) -> Link:
        if self._link is None or self._pid != os.getpid():
            self._link = linked(self._database)
            self._pid = os.getpid()
            self._owner = uuid.uuid4().hex
            self._open = set()
            self._later = []
            self._keeper = None
        return self._link

    # -- what is set aside

    def new_hold(self) -> tuple[str, str, int]:
        """A key, this process's name and the end of the lease for something that is set aside now."""
        key = f"{self._owner}-{next(self._ids)}"
        self._open.add(key)
        if self._keeper is None:
            self._keeper = threading.Thread(target=self._keep, name="agentkv-budget", daemon=True)
            self._keeper.start()
        return key, self._owner, self.now_ms() + self._lease_ms

    def gone(self, key: str) -> None:
        """No longer set aside."""
        self._open.discard(key)

    def later(self, purse: SharedPurse, key: str, used: Spent) -> None:
        """Settle as soon as the database can be used again; until then the lease is renewed."""
        with self._lock:
            self._later.append((purse, key, used))
            if key:
                self._open.add(key)
        self._wake.set()

    def renew(self) -> None:
        """Renew this process's leases and settle what is left over. Never raises."""
        try:
            with self._lock:
                waiting, self._later = self._later, []
            for number, (purse, key, used) in enumerate(waiting):
                try:
                    with purse as tally:
                        if key:
                            purse.take(key)
                        tally.used.add(used)
                except BaseException:
                    with self._lock:
                        self._later.extend(waiting[number:])
                    raise
            if not self._open:
                return
            self.begin(WAIT_S)
            well = False
            try:
                until_ms = self.now_ms() + self._lease_ms
                for table in ("hold", "wait"):
                    self.run(f"UPDATE agentkv_budget_{table} SET until_ms = :until WHERE owner = :owner", until=until_ms, owner=self._owner)  # noqa: S608  # fmt: skip
                well = True
            finally:
                self.end(well=well)
        except LedgerError as error:
            failed("budget_not_renewed", error=str(error))

    def free_lapsed(self, digest: str) -> list[Spent]:
        """Remove the task's holds whose lease is over. One that ends later than a lease from now was made before the
        machine was started anew: its owner renews it, or it lapses a lease from now.
        """
        now_ms = self.now_ms()
        self.run(
            "UPDATE agentkv_budget_hold SET until_ms = :until WHERE digest = :digest AND until_ms > :until",
            until=now_ms + self._lease_ms,
            digest=digest,
        )
        rows = self.run(
            "DELETE FROM agentkv_budget_hold WHERE digest = :digest AND until_ms <= :now RETURNING amount",
            digest=digest,
            now=now_ms,
        )
        if rows:
            count("budget_leases_lapsed")
        return [tallytext.spent_of(row[0]) for row in rows]

    def _keep(self) -> None:
        while not self._closed:
            self._wake.wait(0.2 if self._later else self._lease_ms / 3000)
            self._wake.clear()
            if not self._closed:
                self.renew()

    def close(self) -> None:
        """Settle what is left over, give the connection back. Idempotent; what is still set aside lapses."""
        if self._later and not self._closed:
            self.renew()
        self._closed = True
        self._wake.set()
        with self._lock:
            if self._link is not None and self._pid == os.getpid():
                self._link.close()
            self._link = None


class SharedPurse:
    """One task's tally in the database; see `tally.Purse`."""

    def __init__(self, purses: SharedPurses, task: str, budget: Budget | None) -> None:
        from agentkv.budget.schema import VERSION, digest_of, text_of

        self._purses = purses
        self._version = VERSION
        self._digest = digest_of(task)
        self._task = text_of(task)
        self._new_limits = budget
        self._limits_text = ""
        self._limits: tuple[Budget, dict[str, Any]] = (Budget(), {})
        self._tally = Tally()
        self._read = ("", "")
        self._now_ms = 0
        self._added: list[str] = []
        self._removed: list[str] = []
        self._waits = Waits(purses, self._digest)

    def __enter__(self) -> Tally:
        self._purses.begin(WAIT_S)
        try:
            self._load()
        except BaseException:
            self._purses.undo()
            self._purses.end(well=False)
            raise
        return self._tally

    def _load(self) -> None:
        purses = self._purses
        query = _ROW + purses.row_lock
        self._now_ms = purses.now_ms()
        rows = purses.run(query, digest=self._digest)
        if not rows:
            tally = self._first()
            purses.run(
                "INSERT INTO agentkv_budget (digest, task, limits, sums, age_ms, seen_ms) "
                "VALUES (:digest, :task, :limits, :sums, 0, :now) ON CONFLICT (digest) DO NOTHING",
                digest=self._digest, task=self._task, limits=tallytext.limits_text(tally), sums=tallytext.sums_text(tally), now=self._now_ms,
            )  # fmt: skip
            rows = purses.run(query, digest=self._digest)
        limits_text, sums_text, age_ms, seen_ms, version = rows[0]
        if version is not None and version > self._version:
            raise LedgerError(
                f"the shared budgets have schema version {version} by now, this program knows {self._version}: "
                "update agentkv-sdk"
            )
        if limits_text != self._limits_text:
            self._limits = tallytext.limits_of(limits_text)
            self._limits_text = limits_text
        used, held, loops = tallytext.sums_of(sums_text)
        age_s = (age_ms + max(0, self._now_ms - seen_ms)) / 1000
        limits, grants = self._limits
        self._tally = Tally(
            limits=limits, grants=dict(grants), used=used, held=held, loops=loops, age_s=max(age_s, 1e-6)
        )
        self._read = (limits_text, sums_text)
        self._added, self._removed = [], []
        if self._new_limits is not None:
            self._tally.limits = self._new_limits

    def _first(self) -> Tally:
        """What a row begins with: where it was here and a prune took it, what was known of it."""
        if not self._limits_text:
            return Tally(limits=self._new_limits or Budget(shared=True))
        known = self._tally
        limits = self._new_limits or known.limits
        return Tally(limits=limits, grants=known.grants, used=known.used, loops=known.loops)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        well = False
        try:
            if error is None:
                self._save()
                well = True
        finally:
            for key in self._removed if not well else ():
                self._purses._open.add(key)
            try:
                self._purses.end(well=well)
                for key in self._removed if well else self._added:
                    self._purses.gone(key)
                if well:
                    self._new_limits = None
            except LedgerError:
                for key in self._added:
                    self._purses.gone(key)
                if error is None:
                    raise

    def _save(self) -> None:
        tally = self._tally
        if tally.limits is self._limits[0] and tally.grants == self._limits[1]:
            limits_text = self._read[0]
        else:
            limits_text = tallytext.limits_text(tally)
        sums_text = tallytext.sums_text(tally)
        if (limits_text, sums_text) == self._read:
            return
        self._purses.run(
            "UPDATE agentkv_budget SET limits = :limits, sums = :sums, age_ms = :age, seen_ms = :now WHERE digest = :digest",
            limits=limits_text, sums=sums_text, age=round(tally.age_s * 1000), now=self._now_ms, digest=self._digest,
        )  # fmt: skip

    def hold(self, amount: Spent) -> str:
        key, owner, until_ms = self._purses.new_hold()
        self._added.append(key)
        self._purses.run(
            "INSERT INTO agentkv_budget_hold (id, digest, owner, until_ms, amount) "
            "VALUES (:id, :digest, :owner, :until, :amount)",
            id=key, digest=self._digest, owner=owner, until=until_ms, amount=tallytext.spent_text(amount),
        )  # fmt: skip
        self._tally.held.add(amount)
        return key

    def take(self, key: str) -> Spent | None:
        rows = self._purses.run("DELETE FROM agentkv_budget_hold WHERE id = :id RETURNING amount", id=key)
        self._removed.append(key)
        if not rows:
            return None
        amount = tallytext.spent_of(rows[0][0])
        self._tally.held.take(amount)
        return amount

    def free_lapsed(self) -> bool:
        lapsed = self._purses.free_lapsed(self._digest)
        for amount in lapsed:
            self._tally.held.take(amount)
        return bool(lapsed)

    def amounts(self) -> Mapping[str, Spent]:
        rows = self._purses.run(
            "SELECT id, amount FROM agentkv_budget_hold WHERE digest = :digest", digest=self._digest
        )
        return {key: tallytext.spent_of(text) for key, text in rows}

    def join(self, line: str, priority: int) -> str:
        with self:
            key = self._waits.join(line, priority)
            self._added.append(key)
            return key

    def left(self, key: str) -> None:
        with self:
            self._waits.left(key)
            self._removed.append(key)

    def is_behind(self, line: str, priority: int, key: str) -> bool:
        return self._waits.are_ahead(line, priority, key)

    def wait(self, timeout_s: float) -> None:
        """Nobody tells of other processes: look again soon."""
        time.sleep(min(timeout_s, _LOOK_S))

    def later(self, key: str, used: Spent) -> None:
        self._purses.later(self, key, used)
