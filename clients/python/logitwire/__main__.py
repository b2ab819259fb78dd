"""``python -m logitwire``, the same as the command ``logitwire``."""

import sys

from logitwire.cli import main

if __name__ == "__main__":
    sys.exit(main())
