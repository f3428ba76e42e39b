"""`python -m photon_ext` is `photon-ext`."""

import sys

from photon_ext.cli import main

sys.exit(main())
