"""Run by Python as it starts, in a worker: an exception that ends the script is written where the agent looks for it.

It steps aside at once: PYTHONPATH is as it was, for this process and for those that it starts, and a sitecustomize of
the machine's own is run in its turn. In any other process it does nothing else. It imports what is there already.
"""

import os
import sys


def _step_aside() -> None:
    """Take this folder out of sys.path and PYTHONPATH, and run the machine's own sitecustomize if there is one."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if here in given:
        given.remove(here)
        if given:
            os.environ["PYTHONPATH"] = os.pathsep.join(given)
        else:
            del os.environ["PYTHONPATH"]
    own = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # type: ignore[import-not-found] # noqa: F401 the machine's own, if it has one
    except ImportError as error:
        if own is not None:
            sys.modules["sitecustomize"] = own
        if error.name != "sitecustomize":
            raise


def _write_exceptions(path: str) -> None:
    """Have an exception that ends the script written to ``path``, in the form that torch's agent reads.

    No traceback is shown for an error whose message says all (``says_all``). For one that another rank's end has caused
    (``follows_from``) a line is shown, and its traceback is in the file alone: the agent tells of that other rank.
    """
    before = sys.excepthook

    def write(kind, error, trace):  # type: ignore[no-untyped-def] # no typing: it would be imported in every worker
        says_all = getattr(error, "says_all", False) is True
        try:
            said = str(error)
        except Exception:
            said = "<its __str__ raises>"
        try:
            if not os.path.exists(path):
                import json
                import time
                import traceback

                text = "" if says_all else "".join(traceback.format_exception(kind, error, trace))
                told = {"py_callstack": text[-100_000:], "timestamp": str(int(time.time()))}
                message = f"{kind.__name__}: {said}"[:10_000]
                part = f"{path}.{os.getpid()}"
                with open(part, "x") as file:
                    json.dump({"message": {"message": message, "extraInfo": told}}, file)
                os.replace(part, path)  # whole, or not there: torch's agent raises at one that is no JSON
        except Exception:  # the disk is full, say: what Python prints is all there is then
            pass
        follows_from = getattr(error, "follows_from", None)
        if says_all and before is sys.__excepthook__:
            sys.stderr.write(f"{kind.__module__}.{kind.__qualname__}: {said}\n")
        elif isinstance(follows_from, str) and before is sys.__excepthook__ and os.path.exists(path):
            first = said.strip().partition("\n")[0][:200]
            why = f"{follows_from}: {first}" if first else follows_from
            sys.stderr.write(f"{kind.__name__}{_place_of(trace)}, since {why}; the traceback is in {path}\n")
        else:
            before(kind, error, trace)

    sys.excepthook = write


def _place_of(trace) -> str:  # type: ignore[no-untyped-def]
    """The line of the script at which an exception has passed, in words; empty where it has passed none."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    words = ""
    while trace is not None:
        if script is not None and trace.tb_frame.f_code.co_filename == script:
            words = f" ({os.path.basename(script)}, line {trace.tb_lineno})"
        trace = trace.tb_next
    return words


def _begin() -> None:
    is_worker = os.environ.pop("ELASTIC_EXT_AGENT_PID", "") == str(os.getppid())
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if is_worker and error_file:
        _write_exceptions(error_file)


try:
    _step_aside()
finally:  # the machine's own may raise, of which Python tells as it does without this one
    _begin()
