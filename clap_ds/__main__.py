"""Run `clap-ds` as `python -m clap_ds`."""

import sys

from clap_ds.cli import main

sys.exit(main())
