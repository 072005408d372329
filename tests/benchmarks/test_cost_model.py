"""The cost model: limits by hand, calibration on its own timings, optimality of the best mesh."""

import math
import random
from pathlib import Path

import pytest

from benchmarks import cost_model as cost
from benchmarks.cost_model import Machine, Work
from credibly.errors import InputError

MACHINE = Machine(rate=2e12, bandwidth=5e9, latency=3e-5, launch=4e-4)
WORK = Work(rows=20_000, flops=3e6, parameters=478_410)


def test_one_device_does_not_communicate():
    step = cost.leapfrog_seconds(MACHINE, WORK, chains=3)
    assert step.communication == 0
    assert step.launch == 4e-4
    assert step.compute == pytest.approx(3 * 20_000 * 3e6 / 2e12)
    assert step.seconds == pytest.approx(step.compute + 4e-4)


def test_two_devices_send_every_byte_once_in_two_hops():
    assert cost.all_reduce_seconds(MACHINE, 10**7, 2) == pytest.approx(2 * 3e-5 + 10**7 / 5e9)


def test_large_sums_use_a_ring_and_small_ones_a_tree():
    assert cost.all_reduce_seconds(MACHINE, 10**12, 64) == pytest.approx(2 * 63 / 64 * 10**12 / 5e9, rel=1e-3)
    assert cost.all_reduce_seconds(MACHINE, 8, 64) == pytest.approx(12 * 3e-5, rel=1e-3)


def test_sums_within_a_host_use_its_links():
    near = Machine(2e12, 5e9, 0.0, 4e-4, near_devices=8, near_bandwidth=5e10)
    between_hosts = cost.all_reduce_seconds(MACHINE, 10**8, 8)
    assert cost.all_reduce_seconds(near, 10**8, 8) == pytest.approx(between_hosts / 10, rel=0.02)
    assert cost.all_reduce_seconds(near, 10**8, 16) == pytest.approx(2 * 15 / 16 * 10**8 / 5e9)


def test_the_device_with_the_most_work_counts():
    uneven = cost.leapfrog_seconds(MACHINE, Work(11, 1e9, 10), chains=5, mesh=(2, 3))
    assert uneven.compute == pytest.approx(3 * 4 * 1e9 / 2e12)


def test_chains_are_divided_evenly():
    one, four = (cost.leapfrog_seconds(MACHINE, WORK, 8, mesh) for mesh in ((1, 1), (4, 1)))
    assert four.compute == pytest.approx(one.compute / 4)
    assert four.communication == 0
    assert cost.run_seconds(MACHINE, WORK, 8, (4, 1), steps=7, iterations=5) == pytest.approx(35 * four.seconds)


@pytest.mark.parametrize("devices, chains", [(1, 1), (8, 8), (8, 3), (12, 5), (64, 3), (7, 2)])
def test_no_mesh_beats_the_best_one(devices, chains):
    best = cost.best_mesh(MACHINE, WORK, chains, devices)
    assert best[0] * best[1] == devices
    assert best[0] <= chains
    least = cost.leapfrog_seconds(MACHINE, WORK, chains, best).seconds
    assert all(cost.leapfrog_seconds(MACHINE, WORK, chains, m).seconds >= least for m in cost.meshes(devices, chains))


def test_chains_are_distributed_first():
    assert cost.best_mesh(MACHINE, WORK, 8, 8) == (8, 1)
    assert cost.best_mesh(MACHINE, WORK, 1, 8) == (1, 8)


def test_rows_can_come_before_an_uneven_distribution_of_chains():
    # 5 chains on 4 devices: one device has two chains, or all share the rows.
    free = Machine(2e12, 1e15, 0.0, 0.0)
    assert cost.best_mesh(free, WORK, 5, 4) == (1, 4)


@pytest.mark.parametrize("places, chains, gain", [(2, 1, 1.0), (8, 1, 1.0), (8, 2, 4.0), (64, 3, 5.5)])
def test_break_even_rows_give_the_stated_gain(places, chains, gain):
    rows = cost.break_even_rows(MACHINE, WORK, places, chains=chains, gain=gain)

    def ratio(n):
        work = Work(places * round(n / places), WORK.flops, WORK.parameters)  # a multiple of places: no rounding
        one = cost.leapfrog_seconds(MACHINE, work, chains).seconds
        return one / cost.leapfrog_seconds(MACHINE, work, chains, (1, places)).seconds

    assert ratio(1.05 * rows) > gain
    assert ratio(0.95 * rows) < gain


def test_no_number_of_rows_makes_two_devices_twice_as_fast():
    assert cost.break_even_rows(MACHINE, WORK, 2, gain=2.0) == math.inf
    assert cost.break_even_rows(MACHINE, WORK, 1) == math.inf


def test_more_rows_occupy_more_devices():
    few, many = (cost.most_places(MACHINE, Work(n, WORK.flops, WORK.parameters)) for n in (2_000, 200_000))
    assert 1 <= few < many
    at = cost.leapfrog_seconds(MACHINE, Work(200_000, WORK.flops, WORK.parameters), mesh=(1, many)).seconds
    twice = cost.leapfrog_seconds(MACHINE, Work(200_000, WORK.flops, WORK.parameters), mesh=(1, 2 * many)).seconds
    alone = cost.leapfrog_seconds(MACHINE, Work(200_000, WORK.flops, WORK.parameters)).seconds
    assert alone / (many * at) >= 0.5 > alone / (2 * many * twice)


def test_calibration_recovers_a_machine():
    noise = random.Random(3)
    steps = [(n, (4e-4 + n * 3e6 / 2e12) * noise.uniform(0.99, 1.01)) for n in (100, 300, 1_000, 10_000, 100_000)]
    sums = [(b, (2 * 3e-5 + b / 5e9) * noise.uniform(0.99, 1.01)) for b in (10**3, 10**5, 10**6, 10**7)]
    found = cost.calibrate(steps, sums, flops=3e6, places=2)
    for name in ("rate", "bandwidth", "latency", "launch"):
        # Each end of a line rests on two or more times within 1 %, so 2 % hold for any noise.
        assert getattr(found, name) == pytest.approx(getattr(MACHINE, name), rel=0.02)


def test_a_negative_intercept_becomes_zero():
    found = cost.calibrate([(100, 0.9), (200, 2.0)], [(10, 1.0), (20, 2.0)], flops=1.0, places=2)
    assert found.launch == 0
    assert found.latency == pytest.approx(0, abs=1e-12)


def test_bad_input():
    with pytest.raises(InputError, match="points must have at least two sizes, got 2 times of one size"):
        cost.calibrate([(100, 1.0), (100, 1.1)], [(10, 1.0), (20, 2.0)], flops=1.0, places=2)
    with pytest.raises(InputError, match="sums must take longer for larger sizes"):
        cost.calibrate([(100, 1.0), (200, 2.0)], [(10, 2.0), (20, 1.0)], flops=1.0, places=2)
    with pytest.raises(InputError, match="rate must be a positive number, got 0.0"):
        Machine(0.0, 1.0, 0.0, 0.0)
    with pytest.raises(InputError, match="latency must be a non-negative number of seconds, got -1.0"):
        Machine(1.0, 1.0, -1.0, 0.0)
    with pytest.raises(InputError, match="devices must be a positive integer, got 0"):
        cost.best_mesh(MACHINE, WORK, 1, 0)


def test_one_device_takes_the_measured_time():
    images = Work(50_000, cost.RESNET20.flops, cost.RESNET20.parameters)
    for precision, seconds in (("tf32", 0.318), ("bf16", 0.158)):
        machine = cost.h200(precision)
        assert cost.leapfrog_seconds(machine, images).compute == pytest.approx(seconds)


def test_the_predicted_network_is_that_of_the_zoo():
    """Parameters are counted; FLOPs come from the shapes of every product of one forward pass."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from credibly.networks import zoo

    network = zoo.resnet20_frn()
    assert sum(p.numel() for p in network.parameters()) == cost.RESNET20.parameters
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        network(torch.zeros(1, 3, 32, 32))
    assert 3 * counted.get_total_flops() == pytest.approx(cost.RESNET20.flops, rel=0.01)


def test_the_page_shows_the_predictions_of_the_model():
    from benchmarks import scale

    page = Path(__file__).resolve().parents[2] / "docs" / "scale.md"
    assert scale.prediction_table() in page.read_text()
