"""Memory on GPUs as Python has it: names of devices, streams, and what other libraries offer."""
