"""Test lazy_property: the value is computed once, stored on the instance, and needs no lock."""

import threading

from fp4kit.formats import ElementFormat
from fp4kit.lazy import lazy_property


class Counting:
    def __init__(self):
        self.calls = 0

    @lazy_property
    def value(self):
        """Its explanation."""
        self.calls += 1
        return [self.calls]


def test_a_lazy_property_is_computed_once():
    one, other = Counting(), Counting()
    assert one.value is one.value and one.calls == 1 and other.calls == 0
    assert vars(one)["value"] == [1]
    assert isinstance(Counting.value, lazy_property) and Counting.value.__doc__ == "Its explanation."


def test_threads_that_meet_get_one_value():
    """Two threads that compute the value at once both finish and get one object.

    Each thread waits inside the method until the other has entered it, which a lock would prevent.
    """
    meeting = threading.Barrier(2)

    class Meeting:
        @lazy_property
        def value(self):
            meeting.wait(10)
            return object()

    shared, found = Meeting(), []
    threads = [threading.Thread(target=lambda: found.append(shared.value)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2 and found[0] is found[1]


def test_formats_keep_their_arrays():
    f = ElementFormat("F", 3, 2, 3)
    assert f.midpoints is f.midpoints and f.values is f.values
