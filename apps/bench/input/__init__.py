"""The parts of apps/input_bench.py: readers of mini-batches, and their cost for a training."""
