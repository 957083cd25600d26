"""Mini-batches for each rank, from striped files: the implementation of ``pgasdl.input``."""
