"""Plots of a slide: maps of domains, of their probabilities and of what is uncertain, and how a fit went.

Every function draws into the axes it is given, or into a new figure, and returns the axes. Matplotlib is imported when
the first of them is called, and none changes its settings.
"""

from pdvi.pl.charts import composition, n_domains, trace
from pdvi.pl.colors import palette
from pdvi.pl.maps import certainty, domains, entropy, probabilities

__all__ = ["certainty", "composition", "domains", "entropy", "n_domains", "palette", "probabilities", "trace"]
