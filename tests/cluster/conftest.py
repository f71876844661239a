"""A Ray cluster of several raylets on this machine."""

from __future__ import annotations

import pytest

from knnlm.cluster.connection import import_ray

# A dead machine is noticed within a second, and one that waits for a processor is not taken for dead.
HEALTH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 200,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 3,
}


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """A head without cores and two machines with one core each; tests connect to its address.

    The machines have another cache folder than the tests.
    """
    import_ray()
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KNNLM_CACHE", str(tmp_path_factory.mktemp("machines")))
        made = _start(Cluster)
    yield made
    made.shutdown()


def _start(kind):
    made = kind(initialize_head=True, head_node_args={"num_cpus": 0, "_system_config": HEALTH})
    for _ in range(2):
        made.add_node(num_cpus=1)
    return made
