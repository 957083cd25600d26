"""The parts of apps/pipeline_bench.py: iterations that train, and what exchanges gradients."""
