import sys

from perftrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
