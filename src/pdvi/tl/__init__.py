"""Tools: domains, and how many there are."""

from pdvi.tl.choose import choose_n_domains
from pdvi.tl.domains import domains

__all__ = ["choose_n_domains", "domains"]
