"""Who takes part, which keys there are, and the barrier."""

from __future__ import annotations

import pytest

from cordee.core.errors import StoreError
from cordee.parameters.directory import Directory


def made(*, workers: int = 2, servers: int = 1, num_workers: int | None = None) -> Directory:
    directory = Directory(
        num_workers=workers if num_workers is None else num_workers, num_servers=servers, failure_timeout_s=5
    )
    for index in range(servers):
        directory.register(f"s{index}", "server", pid=index, host="h", address=f"tcp://h:{index}", now_s=0)
    for index in range(workers):
        directory.register(f"w{index}", "worker", pid=10 + index, host="h", address="", now_s=0)
    return directory


def test_participants_are_counted_and_told_apart() -> None:
    directory = made()
    assert directory.is_complete and not directory.is_over
    assert directory.register("w1", "worker", pid=11, host="h", address="", now_s=1).index == 1, "said again"
    with pytest.raises(StoreError, match="started for 2 workers, and 2 have come"):
        directory.register("w2", "worker", pid=12, host="h", address="", now_s=1)
    with pytest.raises(StoreError, match="started for 1 servers"):
        directory.register("s1", "server", pid=12, host="h", address="", now_s=1)
    with pytest.raises(StoreError, match="ghost is not known to this store"):
        directory.record_heartbeat("ghost", 1)
    directory.leave("w0")
    directory.leave("w1")
    assert directory.is_over


def test_the_silent_are_given_up() -> None:
    directory = made()
    directory.record_heartbeat("w0", 4)
    directory.record_heartbeat("s0", 4)
    assert [str(lost) for lost in directory.lose_silent(5.5)] == ["worker 1 (process 11 on h)"]
    assert directory.lose_silent(5.6) == []
    with pytest.raises(StoreError, match=r"worker 1 .* was given up: it was silent for 5 s"):
        directory.record_heartbeat("w1", 6)
    with pytest.raises(StoreError, match=r"barrier: worker 1 \(process 11 on h\) is lost"):
        directory.enter_barrier("w0", 1)


def test_nobody_is_lost_while_nobody_listens() -> None:
    directory = made()
    assert directory.lose_silent(4.0) == []
    assert directory.lose_silent(30.0) == [], "this process was busy in between"
    directory.record_heartbeat("w0", 30.5)
    lost = [participant for tenth in range(301, 330) for participant in directory.lose_silent(tenth / 10)]
    assert [str(one) for one in lost] == ["server 0 (process 0 on h)", "worker 1 (process 11 on h)"]


def test_a_key_gets_the_value_of_worker_0() -> None:
    directory = made()
    record, is_owner = directory.declare("w1", "a", "float32", (2,), 1, 0)
    assert not is_owner and record.owner == "w0"
    assert directory.declare("w0", "a", "float32", (2,), 1, 0)[1]
    with pytest.raises(StoreError, match="key 'a' has no value yet: worker 0"):
        directory.locate("a")
    directory.finish("a")
    assert directory.locate("a") is record
    assert directory.declare("w0", "a", "float32", (2,), 1, 0) == (record, False), "the same call, sent again"
    with pytest.raises(StoreError, match="key 'a' has been initialised before"):
        directory.declare("w0", "a", "float32", (2,), 2, 0)
    with pytest.raises(StoreError, match=r"float32 of shape \(2,\) for another worker, and int8 of shape \(2,\) here"):
        directory.declare("w2", "a", "int8", (2,), 5, 0)
    with pytest.raises(StoreError, match="key 'aa' has not been initialised: call init first; did you mean 'a'"):
        directory.locate("aa")


def test_without_a_number_of_workers_the_first_comes_first_and_another_takes_over() -> None:
    directory = made(num_workers=0)
    assert directory.declare("w1", "a", "float32", (2,), 1, 0)[1]
    assert not directory.declare("w0", "a", "float32", (2,), 1, 1)[1]
    assert directory.declare("w0", "a", "float32", (2,), 1, 6)[1], "the first did not finish in time"
    assert not directory.is_over


def test_the_barrier() -> None:
    directory = made(workers=3)
    assert not directory.enter_barrier("w0", 1)
    assert not directory.enter_barrier("w1", 1)
    assert [worker.index for worker in directory.missing_at_barrier()] == [2]
    assert directory.enter_barrier("w2", 1)
    assert all(directory.has_passed_barrier(name, 1) for name in ("w0", "w1", "w2"))
    assert directory.enter_barrier("w0", 1), "it did not hear the answer and asks again"
    assert not directory.enter_barrier("w0", 2)
    directory.leave("w1")
    directory.leave("w2")
    assert directory.enter_barrier("w0", 2), "those that left are not waited for"


def with_seconds() -> Directory:
    directory = Directory(num_workers=0, num_servers=2, failure_timeout_s=5, replicas=2)
    for index in range(4):
        directory.register(f"s{index}", "server", pid=index, host="h", address=f"tcp://h:{index}", now_s=0)
    return directory


def followed() -> Directory:
    directory = with_seconds()
    directory.follow("s2", "tcp://h:0")
    directory.follow("s3", "tcp://h:1")
    return directory


def test_a_store_with_replicas_is_complete_when_all_seconds_follow() -> None:
    directory = with_seconds()
    assert [directory.participants[f"s{at}"].index for at in range(4)] == [0, 1, 0, 1]
    leaders = [("", ""), ("", ""), ("s0", "tcp://h:0"), ("s1", "tcp://h:1")]
    assert [directory.leader_of(f"s{at}") for at in range(4)] == leaders
    assert directory.num_missing_servers == 2 and directory.addresses == () and not directory.is_complete
    with pytest.raises(StoreError, match="started for 2 servers of 2 processes each, and 4 have come"):
        directory.register("s4", "server", pid=4, host="h", address="tcp://h:4", now_s=0)
    directory.follow("s2", "tcp://h:0")
    directory.follow("s3", "tcp://h:1")
    assert directory.is_complete and directory.addresses == ("tcp://h:0", "tcp://h:1")


def test_a_second_takes_over_and_a_new_process_follows_it() -> None:
    directory = followed()
    (lost,) = directory.lose_dead(lambda one: one.pid == 0)
    assert directory.has_successor(lost) and directory.addresses == ("tcp://h:2", "tcp://h:1")
    with pytest.raises(StoreError, match="was given up"):
        directory.record_heartbeat("s0", 1)
    with pytest.raises(StoreError, match="was given up"):
        directory.drop_follower("s0", "tcp://h:2", 1)
    directory.register("s4", "server", pid=4, host="h", address="tcp://h:4", now_s=1)
    assert directory.leader_of("s4") == ("s2", "tcp://h:2") and directory.is_complete, "the store continues meanwhile"
    with pytest.raises(StoreError, match=r"is nobody's follower: the server at tcp://h:0 does not serve"):
        directory.follow("s4", "tcp://h:0")
    directory.lose_dead(lambda one: one.pid == 2)
    assert directory.addresses == (), "the new one was not given everything before its first one died"
    with pytest.raises(StoreError, match="all processes of server 0 are lost, and its values with them"):
        directory.register("s5", "server", pid=5, host="h", address="tcp://h:5", now_s=1)


def test_a_second_that_was_dropped_never_takes_over() -> None:
    directory = followed()
    assert str(directory.drop_follower("s1", "tcp://h:3", 1)) == "server 1 (process 3 on h)"
    assert directory.drop_follower("s1", "tcp://h:3", 1) is None, "said again"
    with pytest.raises(StoreError, match="was given up"):
        directory.record_heartbeat("s3", 1)
    with pytest.raises(StoreError, match="is nobody's follower"):
        directory.follow("s3", "tcp://h:1")
    directory.lose_dead(lambda one: one.pid == 1)
    assert directory.addresses == (), "nobody has what server 1 acknowledged alone"


def test_servers_without_replicas_stay_where_they_are() -> None:
    directory = made(servers=2)
    assert directory.lose_dead(lambda one: True) == []
    assert len(directory.lose_silent(6)) == 4 and directory.addresses == ("tcp://h:0", "tcp://h:1")
