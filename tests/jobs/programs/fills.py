"""Writes until there is no space, and longer."""

while True:
    print("x" * 8191, flush=True)
