"""Tools: domains, how many there are, and those of other slides."""

from pdvi.tl.annotate import annotate
from pdvi.tl.choose import choose_n_domains
from pdvi.tl.domains import domains

__all__ = ["annotate", "choose_n_domains", "domains"]
