"""Tools that all tests that start jobs share; see README.md."""
