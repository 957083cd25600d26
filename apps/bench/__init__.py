"""The parts of the benchmarks in this folder's parent."""
