"""Where shards live and where steps run."""

from pdvi.executors.disk import Disk
from pdvi.executors.memory import Memory

__all__ = ["Disk", "Memory"]
