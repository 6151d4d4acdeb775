"""The program of the process that forks workers and scripts for tests; what it does is in ranks_worker.py.

    python tests/support/nursery.py PATHS DESCRIPTOR FOLDER

PATHS are those of the tests' process, as JSON, and stand in place of this file's folder. The program is a file, and no
text on a command line, because all that is forked from it is called by it (see ``_run_script`` there).
"""

import json
import sys

if __name__ == "__main__":
    sys.path[:] = json.loads(sys.argv[1])
    from tests.support.ranks_worker import nursery_main

    nursery_main(int(sys.argv[2]), sys.argv[3])
