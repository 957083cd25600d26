"""Operations of other libraries: in jobs of their own, in our ranks, and on our devices."""
