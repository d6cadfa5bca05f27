"""python -m fp4kit is the fp4kit command."""

import sys

from fp4kit.cli import main

if __name__ == "__main__":  # workers of mpi4py.futures import this too, as __worker__
    sys.exit(main())
