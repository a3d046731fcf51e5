import pytest


@pytest.fixture(scope="module")
def local_cluster():
    """Two workers on this machine, and a client."""
    dask, distributed = pytest.importorskip("dask"), pytest.importorskip("distributed")
    settings = {
        "distributed.worker.daemon": True,
        "distributed.admin.log-format": "%(message)s",
        "distributed.deploy.lost-worker-timeout": "120s",  # a worker that starts for longer than that is given up
    }
    with (
        dask.config.set(settings),
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, silence_logs=50
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield cluster, client


@pytest.fixture
def cluster(local_cluster):
    """The cluster with both of its workers: one that the test before has killed is on its way back, or given up."""
    workers, client = local_cluster
    workers.scale(max(2, len(workers.worker_spec)))  # those that were given up begin anew
    client.wait_for_workers(2, timeout=120)
    return local_cluster
