"""``python -m onegraph``: the command without its script."""

from __future__ import annotations

import sys

from onegraph.cli.main import main

sys.exit(main())
