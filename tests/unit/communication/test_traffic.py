"""What a process has given to sockets, in all and by link."""

from __future__ import annotations

from cordee.communication.traffic import OTHERS, Traffic


def test_links_are_counted_since_they_were_taken_last() -> None:
    traffic = Traffic()
    traffic.add(10)  # to somebody who has not said who it is
    traffic.add(20, "worker-1")
    traffic.add(5, "worker-1")
    traffic.add(7, "server-0")
    assert traffic.num_bytes == 42
    assert traffic.take_links() == {"worker-1": 25, "server-0": 7}
    traffic.add(1, "server-0")
    assert traffic.take_links() == {"server-0": 1}
    assert traffic.num_bytes == 43


def test_names_that_come_from_outside_do_not_fill_the_memory() -> None:
    traffic = Traffic()
    for number in range(5000):
        traffic.add(1, f"client-{number}")
    links = traffic.take_links()
    assert len(links) == 1001
    assert links[OTHERS] == 4000
