"""What proves a plan: happens-before, a symbolic run, and the verdict on its result."""
