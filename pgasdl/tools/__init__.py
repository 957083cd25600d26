"""The ``pgasdl`` command: reports, benchmarks, the tuner and the simulator."""
