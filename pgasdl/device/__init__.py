"""Memory on GPUs as Python has it: names of devices, streams, and other libraries' arrays."""
