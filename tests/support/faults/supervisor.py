"""`rushes_worker.supervisor` with the faults of the environment."""

import sys

from rushes_worker.supervisor import main
from support.faults.mutants import install

if __name__ == "__main__":
    install()
    sys.exit(main(sys.argv[1:]))
