"""Device: one engine that computes steps of chunked prefill and decode for whoever runs.

Covers continuous batching in closed form: a *burst* is a number of like steps until somebody finishes, and is cut at a
step's end when the batch changes. A step is decode_base_s + decode_per_token_s x contexts + the prefill of one chunk
(with its quadratic part). Does not cover memory or queues. Seconds and tokens.
"""

from __future__ import annotations

from collections.abc import Callable

from agentkv.sim.costs import Costs


class Call:
    """A model call on the device: `at` of its `prompt` tokens are there, `left` are still to be generated."""

    __slots__ = ("at", "first_step_s", "first_token_s", "key", "left", "owner", "prompt")

    def __init__(self, owner: object, *, key: tuple[float, ...], at: int, prompt: int, output: int) -> None:
        self.owner = owner
        self.key = key
        self.at = at
        self.prompt = prompt
        self.left = output
        self.first_step_s: float | None = None
        """When its first chunk began."""
        self.first_token_s = 0.0


class Device:
    """`at(time_s, call)` is the calendar; `ended(call)` is called when a call has generated its last token."""

    def __init__(
        self,
        costs: Costs,
        *,
        at: Callable[[float, Callable[[], None]], None],
        now_s: Callable[[], float],
        ended: Callable[[Call], None],
    ) -> None:
        self._costs = costs
        self._prefill = costs.prefill
        self._at = at
        self._now_s = now_s
        self._ended = ended
        self._decoding: list[Call] = []
        self._prefilling: list[Call] = []
        self._joining: list[Call] = []
        self._version = 0
        self._began_s = 0.0
        self._steps = 0
        self._chunk = 0
        self._context = 0
        self._head: Call | None = None
        self.busy_s = 0.0

    def __len__(self) -> int:
        return len(self._decoding) + len(self._prefilling) + len(self._joining)

    def add(self, call: Call) -> None:
        """This call computes from the next step on."""
        self._joining.append(call)
        if self._steps == 0:
            self._plan()
        else:
            self._cut()

    def _plan(self) -> None:
        """Begin the next burst."""
        if self._joining:
            self._prefilling += self._joining
            self._prefilling.sort(key=lambda call: call.key)
            self._joining.clear()
        self._version += 1
        decoding, costs = self._decoding, self._costs
        head = self._head = self._prefilling[0] if self._prefilling else None
        if head is None and not decoding:
            self._steps = 0
            return
        self._context = sum(call.at for call in decoding)
        steps = min((call.left for call in decoding), default=1 << 60)
        if head is not None:
            head.first_step_s = self._now_s() if head.first_step_s is None else head.first_step_s
            self._chunk = max(1, costs.token_budget - len(decoding))
            steps = min(steps, -(-(head.prompt - head.at) // self._chunk))
        self._steps = max(1, steps)
        self._began_s = self._now_s()
        self._end_at(self._steps)

    def _lasts_s(self, steps: int) -> float:
        """Seconds of the burst's first steps."""
        decoding, costs = len(self._decoding), self._costs
        contexts = steps * self._context + decoding * steps * (steps - 1) / 2
        total_s = steps * costs.decode_base_s + costs.decode_per_token_s * contexts
        if self._head is not None:
            at = self._head.at
            total_s += self._prefill.extend_s(at, min(self._head.prompt, at + steps * self._chunk))
        return total_s

    def _end_at(self, steps: int) -> None:
        self._steps = steps
        self._version += 1
        version = self._version
        self._at(self._began_s + self._lasts_s(steps), lambda: self._burst_ended(version))

    def _cut(self) -> None:
        """Somebody joins: the burst ends with the step under way."""
        ran_s = self._now_s() - self._began_s
        low, high = 1, self._steps
        while low < high:
            middle = (low + high) // 2
            if self._lasts_s(middle) > ran_s:
                high = middle
            else:
                low = middle + 1
        if low < self._steps:
            self._end_at(low)

    def _burst_ended(self, version: int) -> None:
        if version != self._version:
            return
        steps, head = self._steps, self._head
        now_s = self._now_s()
        self.busy_s += now_s - self._began_s
        finished: list[Call] = []
        for call in self._decoding:
            call.at += steps
            call.left -= steps
            if call.left <= 0:
                finished.append(call)
        if finished:
            self._decoding = [call for call in self._decoding if call.left > 0]
        if head is not None:
            head.at = min(head.prompt, head.at + steps * self._chunk)
            if head.at == head.prompt:  # its last chunk gives the first token
                self._prefilling.remove(head)
                head.first_token_s = now_s
                head.left -= 1
                if head.left > 0:
                    self._decoding.append(head)
                else:
                    finished.append(head)
        self._steps = 0
        self._plan()
        for call in finished:
            self._ended(call)
