"""A buddy allocator of contiguous slots, as systems that reserve a sequence's memory in one piece use it.

D. E. Knuth, The Art of Computer Programming, volume 1, section 2.5: a region is a power of two and lies at a
multiple of itself; a free one is halved until it just holds what is asked, and joins its other half when both
are free.
"""

from __future__ import annotations

import heapq

from kvfolio import _checks


class BuddyAllocator:
    """Hands out regions of so many slots; a number of slots that is no power of two is cut into such.

    Of the regions that fit, the smallest is taken, and of those the lowest.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = _checks.integer("num_slots", num_slots, 0)
        self.num_free = num_slots
        self._free: list[set[int]] = [set() for _ in range(num_slots.bit_length())]
        self._heaps: list[list[int]] = [
            [] for _ in self._free
        ]  # of the same starts, and of some that are gone
        self._taken: dict[int, int] = {}  # start: order
        start = 0
        for order in reversed(range(num_slots.bit_length())):
            if num_slots >> order & 1:
                self._put(start, order)
                start += 1 << order

    @staticmethod
    def rounded(num_slots: int) -> int:
        """What a region of so many slots takes."""
        return 1 << order_of(num_slots)

    @property
    def largest(self) -> int:
        """The most slots that a region can ever have."""
        return 1 << (self.num_slots.bit_length() - 1) if self.num_slots else 0

    def allocate(self, num_slots: int) -> int | None:
        """Where a region of at least so many slots begins; None if no free region is large enough."""
        order = order_of(_checks.integer("num_slots", num_slots, 1))
        for larger in range(order, len(self._free)):
            if self._free[larger]:
                break
        else:
            return None
        start = self._take(larger)
        while larger > order:
            larger -= 1
            self._put(start + (1 << larger), larger)
        self._taken[start] = order
        self.num_free -= 1 << order
        return start

    def free(self, start: int) -> None:
        """Give a region back. KeyError if none begins there."""
        order = self._taken.pop(start)
        self.num_free += 1 << order
        while order + 1 < len(self._free) and start ^ 1 << order in self._free[order]:
            self._free[order].discard(start ^ 1 << order)
            start &= ~(1 << order)
            order += 1
        self._put(start, order)

    def _put(self, start: int, order: int) -> None:
        self._free[order].add(start)
        heapq.heappush(self._heaps[order], start)

    def _take(self, order: int) -> int:
        while (start := heapq.heappop(self._heaps[order])) not in self._free[order]:
            pass
        self._free[order].discard(start)
        return start


def order_of(num_slots: int) -> int:
    """The exponent of the smallest power of two that is not smaller."""
    return (num_slots - 1).bit_length()
