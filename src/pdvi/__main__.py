"""`python -m pdvi`."""

from pdvi.cli import main

main()
