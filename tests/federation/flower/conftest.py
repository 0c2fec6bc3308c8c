"""What processes and tests of a federation import by name lies here."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
