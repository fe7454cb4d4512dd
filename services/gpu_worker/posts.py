"""Long polls that stand while nothing is known to wait, so that a request comes without being asked for.

On the subjects that the worker heard of last, of its own queue and of the shared ones: a lone request then costs no round trip
between its bell and its delivery. Each poll may bring a request, so there are never more than places for them; what comes in
spite of that, since the room filled meanwhile, is handed back. The server serves the polls of several workers in the order in
which they came, so those who are idle share a subject.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from shared.lifecycle import cancel_and_wait
from shared.protocol import subjects

MOST: Final = 5
"""Polls of a worker: each costs the server a request in every long poll's time."""

_Task: TypeAlias = asyncio.Task[bool]


@dataclass
class _Post:
    poll: _Task
    rung: bool = False  # the next request is told already, and is this poll's


class Posts:
    """Belongs to the event loop, and to one `Puller`."""

    def __init__(
        self,
        own: str,
        poll: Callable[[str], Coroutine[Any, Any, bool]],
        *,
        on_over: Callable[[], None] = lambda: None,
    ) -> None:
        """`own` is what the subjects of the worker's own queue begin with; `poll` waits for one request of a subject for a
        time, starts it, and tells whether there was one; `on_over` is called when a poll is over."""
        self._own: Final = own
        self._poll: Final = poll
        self._on_over: Final = on_over
        self._heard: Final[OrderedDict[str, None]] = OrderedDict()  # the last one last
        self._posts: Final[dict[str, _Post]] = {}

    @property
    def standing(self) -> Collection[_Task]:
        """The polls under way, or over and not yet asked for."""
        return [post.poll for post in self._posts.values()]

    def answers(self, subject: str) -> bool:
        """Something came on a subject: whether a poll that stands there will bring it. It brings one; who comes after it
        is to be asked for."""
        if subject.startswith(self._own) or subjects.queue_of(subject) in subjects.PRIORITIES:
            self._heard[subject] = None
            self._heard.move_to_end(subject)
            while len(self._heard) > MOST:
                self._heard.popitem(last=False)
        post = self._posts.get(subject)
        if post is None or post.rung:
            return False
        post.rung = True
        return True

    def fill(self, places: int, *, but: Callable[[str], bool] = lambda subject: False) -> None:
        """Let polls stand, those of the own queue first, as long as there are more places than polls; none `but` names."""
        for subject in sorted(reversed(self._heard), key=lambda heard: not heard.startswith(self._own)):
            if len(self._posts) >= places:
                return
            if subject not in self._posts and not but(subject):
                poll = asyncio.create_task(self._poll(subject))
                poll.add_done_callback(lambda _: self._on_over())
                self._posts[subject] = _Post(poll)

    def wants(self, subject: str) -> bool:
        """Whether a poll of the subject may stand again soon."""
        return subject in self._heard

    def over(self) -> list[str]:
        """Forget the polls that are over. The subjects of those that were told of something and brought nothing: mostly it
        went to another worker."""
        missed = []
        for subject in [name for name, post in self._posts.items() if post.poll.done()]:
            post = self._posts.pop(subject)
            if not post.poll.result() and post.rung:
                missed.append(subject)
        return missed

    async def cancel(self) -> None:
        """Give up what stands."""
        await cancel_and_wait(self.standing)
