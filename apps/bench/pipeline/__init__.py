"""The parts of apps/pipeline_bench.py: iterations that train, and exchanges of gradients."""
