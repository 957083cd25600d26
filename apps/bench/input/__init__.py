"""The parts of apps/input_bench.py: readers of mini-batches, and what they cost a training."""
