"""The parts of the checker: happens-before, a symbolic run, and the verdict on its result."""
