"""Where shards live and where steps run."""

from pdvi.executors.memory import Memory

__all__ = ["Memory"]
