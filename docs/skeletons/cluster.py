"""A script to copy: a fit on a cluster, whichever it is. Only `cluster` knows what kind; all else is the same.

python docs/skeletons/cluster.py slide.pdvi --kind local --workers 2
python docs/skeletons/cluster.py slide.pdvi --kind slurm --workers 20      # pip install dask-jobqueue
python docs/skeletons/cluster.py slide.pdvi --kind kubernetes --workers 20 # pip install dask-kubernetes
python docs/skeletons/cluster.py slide.pdvi --kind tcp://10.0.0.1:8786     # a scheduler that is there
"""

import argparse
from pathlib import Path

from distributed import Client

import pdvi

CORES, MEMORY, HOURS = 4, "16GB", 8  # of one worker


def cluster(kind, workers):
    """Return what a client connects to: a cluster that this script starts, or the address of one that is there."""
    if kind == "local":
        from distributed import LocalCluster

        return LocalCluster(workers, threads_per_worker=1, dashboard_address=None, memory_limit=0)
    if kind == "slurm":
        from dask_jobqueue import SLURMCluster

        jobs = SLURMCluster(cores=CORES, processes=1, memory=MEMORY, walltime=f"{HOURS:02d}:00:00")
        jobs.scale(jobs=workers)
        return jobs
    if kind == "kubernetes":
        from dask_kubernetes.operator import KubeCluster, make_cluster_spec

        limits = {"cpu": str(CORES), "memory": MEMORY.replace("GB", "G")}
        spec = make_cluster_spec(name="pdvi", image="pdvi:latest", n_workers=workers)
        volume = {"name": "data", "persistentVolumeClaim": {"claimName": "data"}}
        for part in ("scheduler", "worker"):
            pod = spec["spec"][part]["spec"]
            pod["volumes"] = [volume]
            pod["containers"][0]["volumeMounts"] = [{"name": "data", "mountPath": "/data"}]
        spec["spec"]["worker"]["spec"]["containers"][0]["resources"] = {"limits": limits, "requests": limits}
        return KubeCluster(custom_cluster_spec=spec)
    return kind


def main():
    """Fit what a store holds, and save the result beside it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path, help="what pdvi.write_store wrote, where all workers see it")
    parser.add_argument("--kind", default="local")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=100)
    options = parser.parse_args()
    kept = options.store.with_suffix(".run.zarr")
    with Client(cluster(options.kind, options.workers)) as client:
        client.wait_for_workers(1)  # others get their part when they come
        executor = pdvi.Dask(client)
        result = pdvi.fit(
            pdvi.Problem.from_store(options.store),
            pdvi.P2DVI(),
            max_epochs=options.epochs,
            start=kept if kept.exists() else None,  # a job that ran out of time goes on
            checkpoint=kept,
            executor=executor,
        )
        result.save(options.store.with_suffix(".result.zarr"))
    print(result.status.name, f"{result.objective:.8g}")
    print(result.trace[["epoch", "seconds", "objective", "event"]].tail(3).to_string(index=False))
    print(executor.traffic)


if __name__ == "__main__":
    main()
