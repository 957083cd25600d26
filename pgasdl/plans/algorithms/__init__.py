"""One file for each algorithm, and what they share: blocks, trees, a rank's view."""
