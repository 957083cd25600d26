"""The parts of apps/pipeline_bench.py."""
