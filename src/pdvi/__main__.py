"""Run the command line with `python -m pdvi`."""

from pdvi.cli import main

main()
