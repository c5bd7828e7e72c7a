import sys

from rushes_cli.main import main

sys.exit(main())
