"""The cost model on made-up machines, against sums done by hand."""

from __future__ import annotations

import msgspec
import pytest
from made_up import MB, cluster, here, profile, work

from cordee.core.errors import JobError
from cordee.planner.amounts import in_bytes, in_time
from cordee.planner.cost_model import predict
from cordee.planner.hardware import DescribedCluster, Device, Link, ThisMachine
from cordee.planner.measurements import Machine, Timing
from cordee.planner.pipelines import Pipeline, cut, last_pass_s, num_ahead, num_chunks_of, order_of
from cordee.planner.plan import refuse_without_room
from cordee.planner.prediction import Candidate, Work
from cordee.planner.search import candidates, choose, degrees, search


def of(strategy: str, workers: int, **settings: object) -> Candidate:
    return Candidate(strategy=strategy, workers=workers, settings=settings)


def test_single_is_what_was_measured() -> None:
    found = predict(of("single", 1), work(profile(), here(1)))
    assert found.step_s == pytest.approx(0.041)  # four blocks of 10 ms, 1 ms of optimizer
    assert found.samples_per_second == pytest.approx(64 / 0.041)
    # Parameters and gradients of 40 MB each, optimizer of 80; activations, two outputs, the input of 64 samples.
    assert found.memory_bytes == pytest.approx(160 * MB + 64 * (4000 + 200 + 10))
    assert found.traffic_bytes == 0


def test_data_parallel_adds_the_exchange_of_the_gradients() -> None:
    found = predict(of("data_parallel", 2), work(profile(), here(2, slowdown=1.5)))
    # Half the samples at 1.5 times the time, then 40 MB copied and 40 MB reduced at 1 GB/s.
    assert found.compute_s == pytest.approx(1.5 * (0.020 + 0.001))
    assert found.communication_s == pytest.approx(0.080)
    assert found.step_s == pytest.approx(found.compute_s + found.communication_s)
    assert found.traffic_bytes == pytest.approx(40 * MB)
    assert "all-reduce of 40 MB takes 80 ms of a 111 ms step" in found.note


def test_a_ring_moves_the_bytes_of_the_textbook() -> None:
    slow = predict(of("data_parallel", 4), work(profile(), cluster(4)))
    assert slow.communication_s == pytest.approx(2 * 3 / 4 * 0.040)
    assert slow.traffic_bytes == pytest.approx(2 * 3 / 4 * 40 * MB)
    servers = predict(of("parameter_server", 4, servers=1, staleness=0), work(profile(), cluster(4)))
    # One server takes 4 x 40 MB in and gives as many out; four servers a quarter each.
    assert servers.communication_s == pytest.approx(2 * 0.160 + 0.001)
    spread = predict(of("parameter_server", 4, servers=4, staleness=0), work(profile(), cluster(4)))
    assert spread.communication_s == pytest.approx(2 * 0.040 + 0.001 / 4)


def test_overlap_hides_what_the_backward_pass_covers() -> None:
    hardware = cluster(2)
    plain = predict(of("data_parallel", 2), work(profile(), hardware))
    hardware.overlaps = True
    hidden = predict(of("data_parallel", 2), work(profile(), hardware))
    assert plain.communication_s == pytest.approx(0.040)
    assert hidden.communication_s == pytest.approx(0.040 - 0.020 * 2 / 3)


def test_the_slowest_device_sets_the_pace_and_the_others_idle() -> None:
    found = predict(of("data_parallel", 2), work(profile(), cluster(2, speeds=(2.0, 1.0))))
    assert found.compute_s == pytest.approx(0.021)
    assert found.idle_share == pytest.approx((0.021 - 0.0105) / 2 / found.step_s)


def test_sharded_saves_memory_and_costs_half_as_much_traffic_again() -> None:
    copies, slices = (predict(of(name, 4), work(profile(), cluster(4))) for name in ("data_parallel", "sharded"))
    # A copy has parameters, gradients, a flat buffer and an optimizer of twice the parameters. A slice is a quarter of
    # that, without the buffer, and three units of 10 MB; and of the whole, which lies in files, 16 MB are in memory.
    assert copies.memory_bytes == pytest.approx(5 * 40 * MB, rel=3e-3)
    assert slices.memory_bytes == pytest.approx(40 * MB + 30 * MB + (16 << 20), rel=3e-3)
    assert slices.traffic_bytes == pytest.approx(1.5 * copies.traffic_bytes)


@pytest.mark.parametrize("num_micro", [4, 8, 32])
def test_a_pipeline_idles_as_theory_says(num_micro: int) -> None:
    found = predict(
        of("pipeline", 4, microbatches=num_micro, schedule="gpipe"), work(profile(4), cluster(4, rate=1e15))
    )
    assert found.idle_share == pytest.approx(3 / (num_micro + 3), abs=0.001)


def test_schedules_differ_in_memory_and_in_idling() -> None:
    plain = profile(8)
    blocks = tuple(msgspec.structs.replace(block, activation_bytes=10.0 * MB) for block in plain.blocks)
    heavy = msgspec.structs.replace(plain, blocks=blocks)  # what it computes takes more memory than saving it
    kinds = {
        name: predict(of("pipeline", 4, microbatches=16, schedule=name), work(heavy, cluster(4, rate=1e12)))
        for name in ("gpipe", "1f1b", "interleaved")
    }
    assert kinds["1f1b"].memory_bytes < kinds["gpipe"].memory_bytes
    assert kinds["interleaved"].idle_share < kinds["1f1b"].idle_share


def test_tensor_slices_only_what_can_be_sliced() -> None:
    whole = predict(of("tensor", 2), work(profile(splittable=1.0), cluster(2, rate=1e15)))
    half = predict(of("tensor", 2), work(profile(splittable=0.5), cluster(2, rate=1e15)))
    assert whole.compute_s == pytest.approx(0.020 + 0.0005)
    assert half.compute_s == pytest.approx(0.030 + 0.0005)


def test_tensor_keeps_a_slice_of_what_is_inside_its_layers() -> None:
    task = work(profile(splittable=1.0), cluster(4))
    two, four = (predict(of("tensor", number), task).memory_bytes for number in (2, 4))
    state = 40 * MB * 4  # parameters, gradients, and the optimizer's two
    # Of 1000 bytes a sample and block the output's 100 stay whole; the peak of a pass is 4200 bytes for 4000 kept ones.
    inside = 4 * 900 * 64 * 4200 / 4000
    assert two - four == pytest.approx((state + inside) * (1 / 2 - 1 / 4))


def test_accumulation_takes_less_memory_for_the_same_work() -> None:
    plain = predict(of("single", 1), work(profile(), here(1)))
    parts = predict(of("single", 1), work(profile(), here(1), accumulate=4))
    assert parts.step_s == pytest.approx(plain.step_s)
    assert parts.memory_bytes < plain.memory_bytes


def test_cuts_are_as_even_as_the_blocks_allow() -> None:
    assert cut([[1.0, 1.0, 1.0, 3.0]] * 2, 2) == [(0, 3), (3, 4)]
    assert cut([[3.0, 1.0, 1.0, 1.0]] * 2, 2) == [(0, 1), (1, 4)]
    assert cut([[0.0, 0.0, 5.0]] * 3, 3) == [(0, 1), (1, 2), (2, 3)]
    assert cut([[1.0] * 4, [2.0] * 4], 2)[0] == (0, 3)  # the second device is half as fast
    with pytest.raises(ValueError, match="2 blocks cannot make 3 stages"):
        cut([[1.0, 1.0]] * 3, 3)


def test_one_stage_has_nobody_to_wait_for() -> None:
    assert last_pass_s(Pipeline([1.0], [2.0], 9.0, 4, "gpipe", 1)) == 12.0


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_stages_on_shared_cores_take_what_their_work_takes(schedule: str) -> None:
    num_chunks = num_chunks_of(schedule, 4)
    chunks = ([4.0 / num_chunks] * num_chunks, [8.0 / num_chunks] * num_chunks)
    pipeline = Pipeline(*chunks, 0.0, 8, schedule, 4)
    alone = last_pass_s(pipeline)
    assert alone == pytest.approx({"gpipe": 33.0, "1f1b": 33.0, "interleaved": 28.5}[schedule])  # (8 + 3) passes of 3
    one = last_pass_s(pipeline, num_lanes=1)
    assert one == pytest.approx(4 * 8 * 3.0)  # somebody always has something to do
    two = last_pass_s(pipeline, num_lanes=2)
    assert 4 * 8 * 3.0 / 2 < two < 2 * alone  # those who wait leave their core to the others


def test_chunks_that_are_unlike_make_interleaving_slower() -> None:
    even = last_pass_s(Pipeline([1.0] * 4, [2.0] * 4, 0.0, 8, "interleaved", 2))
    uneven = last_pass_s(Pipeline([2.0, 1.0, 1.0, 0.0], [4.0, 2.0, 2.0, 0.0], 0.0, 8, "interleaved", 2))
    assert uneven >= even + 7 * 3.0  # the first worker has three quarters of the work


def test_a_long_schedule_is_estimated_as_a_short_one_is_simulated() -> None:
    for schedule, num_chunks in (("gpipe", 4), ("interleaved", 8)):
        chunks = ([4.0 / num_chunks] * num_chunks, [8.0 / num_chunks] * num_chunks)
        counts = (256 // num_chunks, 256 // num_chunks + 8)
        simulated, estimated = (last_pass_s(Pipeline(*chunks, 0.1, count, schedule, 4)) for count in counts)
        assert estimated - simulated == pytest.approx(8 * 3.0, abs=3.0)


def test_orders_have_every_pass_once() -> None:
    for schedule in ("gpipe", "1f1b", "interleaved"):
        order = order_of(schedule, 1, 4, 8)
        assert len(order) == len(set(order)) == (32 if schedule == "interleaved" else 16)
        first_back = next(place for place, one in enumerate(order) if one.is_backward)
        assert num_ahead(schedule, 1, 4, 8) == first_back
    assert [int(task.is_backward) for task in order_of("1f1b", 2, 4, 4)] == [0, 0, 1, 0, 1, 0, 1, 1]


def test_the_search_of_64_devices__the_fastest() -> None:
    task = work(profile(60, splittable=0.5), cluster(16, 4, rate=3e9), batch_size=4096)
    assert len(list(candidates(task, 64))) < 500  # 0.7 ms each
    found = search(task, 64)
    assert [p.step_s for p in found] == sorted(p.step_s for p in found)
    assert {p.strategy for p in found} >= {"single", "data_parallel", "sharded", "pipeline", "tensor", "hybrid"}
    best, second = choose([p for p in found if p.strategy in ("single", "data_parallel")])
    assert best is not None and second is not None
    assert best.step_s <= second.step_s and best.strategy == "data_parallel"


def test_only_what_fits_is_chosen() -> None:
    task = work(profile(), cluster(2, memory_bytes=170 * MB))  # a copy of the model, but no flat buffer beside it
    found = search(task, 2)
    best, _ = choose([p for p in found if p.strategy in ("single", "data_parallel")])
    assert best is not None and best.strategy == "single"
    assert choose([p for p in found if p.strategy == "data_parallel"]) == (None, None)
    short = next(p for p in found if p.strategy == "data_parallel")
    assert short.missing_bytes == pytest.approx(short.memory_bytes - 170 * MB)


def test_what_fits_nowhere_is_refused_with_the_amount() -> None:
    found = search(work(profile(), cluster(2, memory_bytes=100 * MB)), 2)
    with pytest.raises(JobError, match=r"single on 1 worker comes nearest, and lacks 60.3 MB \(needs 160 MB"):
        refuse_without_room([p for p in found if p.strategy == "single"])


def test_degrees_are_powers_divisors_and_the_most() -> None:
    assert degrees(1) == [1]
    assert degrees(6) == [1, 2, 3, 4, 6]


def test_amounts_read_well() -> None:
    assert [in_bytes(n) for n in (12, 46_123_000, 2.5e9)] == ["12 B", "46.1 MB", "2.5 GB"]
    assert [in_time(s) for s in (38e-6, 0.1204, 2.0)] == ["38 µs", "120 ms", "2 s"]


def test_of_equals_the_plainest_is_chosen() -> None:
    found = predict(of("data_parallel", 2), work(profile(), here(2)))
    served = msgspec.structs.replace(found, strategy="parameter_server", step_s=found.step_s * 0.97)
    faster = msgspec.structs.replace(served, step_s=found.step_s * 0.9)
    assert choose([served, found]) == (found, served)
    assert choose([faster, found]) == (faster, found)


def test_replicas_on_other_hosts_sum_through_the_networks_of_all_their_parts() -> None:
    devices = [Device(f"node-{index // 4}", "gpu", 1.0, 1e12) for index in range(8)]
    networks = {host: Link(0.001, 1e9) for host in ("node-0", "node-1")}
    hardware = DescribedCluster(devices, Link(0.0, 1e12), networks, overlaps=False)
    work = Work(profile(splittable=1.0), 64, hardware)
    mesh = {"data": 4, "tensor": 2}
    found = predict(Candidate(strategy="hybrid", workers=8, settings={"mesh": mesh}), work)
    # Two rings of four, each with 20 of 40 MB, cross both networks: 6 hops of a quarter of 40 MB.
    assert found.communication_s == pytest.approx(6 * (0.001 + 10e6 / 1e9), rel=0.01)
    assert found.note.startswith("summing gradients over the replicas takes 66 ms") and found.note.endswith("ms step")
    # With slices on all hosts and replicas inside them there would be nothing to sum over the networks but outputs.
    inside = predict(Candidate(strategy="hybrid", workers=4, settings={"mesh": {"data": 2, "tensor": 2}}), work)
    assert inside.communication_s < 0.001


def test_the_slowest_replica_of_a_stage_sets_its_pace() -> None:
    speeds = [1.0, 1.0, 1.0, 0.5]  # the second stage of the second replica
    devices = [Device("here", "gpu", speed, 1e12) for speed in speeds]
    hardware = DescribedCluster(devices, Link(0.0, 1e15), {"here": Link(0.0, 1e15)}, overlaps=False)
    settings = {"mesh": {"data": 2, "pipeline": 2}, "microbatches": 2, "schedule": "gpipe"}
    found = predict(Candidate(strategy="hybrid", workers=4, settings=settings), Work(profile(6), 128, hardware))
    # Six blocks of 5 ms for each micro-batch: four on the fast stage, two that take twice as long on the slow one.
    assert found.idle_share < 0.4 and found.compute_s == pytest.approx(2 * 0.020 + 0.001, rel=0.1)


def test_where_stages_share_cores_models_are_not_cut_into_more_chunks() -> None:
    def schedules(cores: int) -> set[str]:
        hardware = ThisMachine(Machine(cores=cores), 2, 1e12)
        found = [one for one in candidates(Work(profile(8), 64, hardware), 2) if one.strategy == "pipeline"]
        return {one.settings["schedule"] for one in found}

    assert schedules(cores=2) == {"gpipe", "1f1b", "interleaved"}
    assert schedules(cores=1) == {"gpipe", "1f1b"}


def test_a_placement_by_hand_is_predicted_as_it_is() -> None:
    named = [msgspec.structs.replace(block, name=f"b{i}") for i, block in enumerate(profile(4).blocks)]
    task = work(msgspec.structs.replace(profile(4), blocks=tuple(named)), cluster(2, rate=1e15))
    even, uneven = (
        predict(of("pipeline", 2, microbatches=4, placement=placement), task)
        for placement in ([["b0", "b1"], ["b[23]"]], [["b0"], ["b[1-3]"]])
    )
    assert even.step_s == pytest.approx(predict(of("pipeline", 2, microbatches=4), task).step_s)
    assert uneven.step_s > even.step_s and uneven.compute_s == pytest.approx(0.030 + 0.0005)
    with pytest.raises(JobError, match="names 'b7', which no block has"):
        predict(of("pipeline", 2, microbatches=4, placement=[["b0", "b7"], ["b[1-3]"]]), task)


def test_recomputation_takes_a_forward_pass_more_and_keeps_inputs_only() -> None:
    plain = profile(4)
    blocks = tuple(msgspec.structs.replace(block, activation_bytes=1.0 * MB) for block in plain.blocks)
    task = work(msgspec.structs.replace(plain, blocks=blocks), cluster(2, rate=1e15))
    kept = predict(of("pipeline", 2, microbatches=4, schedule="gpipe"), task)
    again = predict(of("pipeline", 2, microbatches=4, schedule="gpipe", recompute=True), task)
    # A worker has two blocks of 10 ms, a third of it forward: 20 ms become 20 * 4 / 3.
    assert again.compute_s - kept.compute_s == pytest.approx(0.020 / 3)
    assert again.step_s > kept.step_s
    assert kept.memory_bytes - again.memory_bytes == pytest.approx(2 * MB * (64 - 16), rel=0.01)


def together(num_processes: int, times_s: dict[int, float]) -> tuple[Timing, ...]:
    """Return timings of `profile(4)` in several processes: seconds of a block by samples, a third of them forward."""
    return tuple(
        Timing(
            num_processes=num_processes,
            num_threads=1,
            samples=samples,
            forward_s=(seconds / 3,) * 4,
            backward_s=(seconds * 2 / 3,) * 4,
            optimizer_s=0.001,
            other_s=0.0,
        )
        for samples, seconds in times_s.items()
    )


def test_slices_of_a_whole_batch_take_no_less_than_it_took_alone() -> None:
    plain = profile(4)  # 64 samples take 10 ms a block, and 32 take 5
    flat = msgspec.structs.replace(plain, timings=(*plain.timings, *together(2, {8: 0.004, 32: 0.005})))
    machine = here(2)
    assert machine.step(flat, 32, 0, 2).pass_s == pytest.approx(4 * 0.005)
    assert machine.step(flat, 64, 0, 2).pass_s == pytest.approx(4 * 0.010)  # and not 6.3 ms, as the line says
    steep = msgspec.structs.replace(plain, timings=(*plain.timings, *together(2, {8: 0.001, 32: 0.010})))
    assert machine.step(steep, 64, 0, 2).pass_s == pytest.approx(4 * 0.022)


def test_stages_that_take_turns_on_a_core_pay_for_it() -> None:
    plain = profile(4)
    machine = Machine(cores=2, slowdowns={2: 1.0, 4: 2.0})
    alike = (*together(2, {4: 0.002, 16: 0.008}), *together(4, {4: 0.004, 16: 0.016}))
    slower = (*together(2, {4: 0.002, 16: 0.008}), *together(4, {4: 0.006, 16: 0.024}))

    def step_s(timings: tuple[Timing, ...]) -> float:
        known = msgspec.structs.replace(plain, timings=(*plain.timings, *timings))
        return predict(of("pipeline", 4, microbatches=4), work(known, ThisMachine(machine, 4, 1e12))).step_s

    # Four processes on two cores take turns: twice the time of two is free of charge, three times is not.
    assert step_s(slower) > 1.3 * step_s(alike)
