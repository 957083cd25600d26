"""Starting ranks: ``pgasdl run``, our own launcher, and MPI's."""
