"""python -m fp4kit is the fp4kit command."""

import sys

from fp4kit.cli import main

sys.exit(main())
