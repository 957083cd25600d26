"""Other libraries: what they do in jobs of their own, in our ranks, and on our devices."""
