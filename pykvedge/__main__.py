"""python -m pykvedge: the same as the kvedge program."""

from pykvedge.cli import main

main()
