"""Random order by the seed, in which everything is drawn equally often."""

import random
import threading
from collections.abc import Sequence
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Deck(Generic[_T]):
    """Cards that are shuffled again whenever all of them were drawn."""

    def __init__(self, cards: Sequence[_T], chance: random.Random) -> None:
        self._cards = list(cards)
        self._chance = chance
        self._left: list[_T] = []
        self._lock = threading.Lock()

    def draw(self) -> _T:
        with self._lock:
            if not self._left:
                self._left = self._chance.sample(self._cards, len(self._cards))
            return self._left.pop()
