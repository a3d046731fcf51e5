"""Where shards live and where steps run."""

from pdvi.executors.dask import Dask
from pdvi.executors.disk import Disk
from pdvi.executors.memory import Memory

__all__ = ["Dask", "Disk", "Memory"]
