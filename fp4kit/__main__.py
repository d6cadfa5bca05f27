"""Run the fp4kit command: `python -m fp4kit`."""

import sys

from fp4kit.cli import main

if __name__ == "__main__":  # workers of mpi4py.futures import this module too, under the name __worker__
    sys.exit(main())
