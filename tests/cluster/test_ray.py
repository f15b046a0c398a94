"""Grids on a Ray cluster of two nodes on this machine, one of which dies."""

from __future__ import annotations

import pytest

from tests.cluster.conftest import ablate, metrics, trains
from tests.training.gates import wait_for

pytest.importorskip("ray", reason="ray is not installed: make cluster-test")
pytestmark = pytest.mark.slow


def test_a_grid_equals_the_local_one_although_a_node_dies(local, monkeypatch):
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_worker_niceness", "0")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    dying = cluster.add_node(num_cpus=1)
    try:
        process = ablate("--out", "runs/ray", "--executor", "ray", "--jobs", "2", RAY_ADDRESS=cluster.address)
        wait_for(lambda: trains("runs/ray"))
        cluster.remove_node(dying, allow_graceful=False)
        assert process.wait() == 0, process.stdout.read()
    finally:
        cluster.shutdown()
    assert metrics("runs/ray") == local and len(local) == 6
