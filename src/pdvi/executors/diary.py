"""What happens in an executor that the trace should tell."""

from __future__ import annotations


class Diary:
    """Takes notes, and hands them out once."""

    _told: tuple[str, ...] = ()

    def tell(self, event: str) -> None:
        """Something for the trace."""
        self._told += (event,)

    def events(self) -> list[str]:
        """What was told since the last call."""
        told, self._told = self._told, ()
        return list(told)
