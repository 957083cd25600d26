"""The start of the ranks of every benchmark."""

from __future__ import annotations

import sys

from pgasdl.tools.bench.request import Request
from pgasdl.transports import OF_THREADS, is_by_mpi


def start(request: Request, mpi: str = "any") -> int:
    """Run the ranks to their end, and return the exit status. ``mpi``: launcher of transport mpi.

    With transport loopback they are threads of this process.
    """
    if request.transport == OF_THREADS:
        from pgasdl import loopback
        from pgasdl.tools.bench.worker import measure

        loopback.run(
            request.ranks,
            lambda context: measure(context, request),
            plan_modules=request.plan_modules,
        )
        return 0
    from pgasdl.runtime.launch.run import LocalJob, inherited, run

    environ = inherited()
    if request.op in ("plans", "tune"):
        environ.pop("PGASDL_POLICY", None)  # which plans are best is the result here
    environ["PGASDL_TRANSPORT"] = request.transport
    environ.setdefault("PGASDL_LOG", "warning")  # the header says it
    sys.stdout.flush()
    program = ["-P", "-m", "pgasdl.tools.bench.worker", request.dump()]
    if is_by_mpi(request.transport) and request.op != "plans":  # of which several jobs follow
        from pgasdl.runtime.launch import mpiexec

        found = mpiexec.find_any() if mpi == "any" else mpiexec.find(mpi)
        mpiexec.run(found, request.ranks, program, environ)
    return run(LocalJob(program, request.ranks, environ, prefix=False))
