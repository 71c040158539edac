"""A Python with torch in memory already. Forks for each program, so that it starts at once; runs it as python would.

Takes jobs on stdin, a JSON object a line, and answers each with the exit status of its process on stdout.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any


def status_of(arguments: list[str]) -> int:
    """Runs ``python arguments...`` in this process."""
    try:
        if arguments[0] == "-m":
            sys.argv, sys.path[0] = arguments[1:], str(Path.cwd())
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = arguments, str(Path(arguments[0]).parent)
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def become(job: dict[str, Any]) -> int:
    os.chdir(job["cwd"])
    os.environ.update(job["env"])
    for number, name in ((0, os.devnull), (1, job["stdout"]), (2, job["stderr"])):
        file = os.open(name, os.O_RDWR | os.O_CREAT, 0o644)
        os.dup2(file, number)
        os.close(file)
    status = status_of(job["arguments"])
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def main() -> None:
    import torch._dynamo  # what the first optimizer imports
    import torch.utils.data  # noqa: F401

    import nanguard.autopilot.entry
    import nanguard.cli  # noqa: F401

    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            os._exit(become(json.loads(line)))
        _, ended = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(ended), flush=True)


if __name__ == "__main__":
    main()
