"""The algorithms, one in each file, and what they share: blocks, trees, a rank's view."""
