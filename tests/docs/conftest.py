"""Make the scripts of docs/pictures/ importable."""

import sys

from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / "docs" / "pictures"))
