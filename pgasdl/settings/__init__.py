"""The ``PGASDL_*`` variables: how each is parsed, and the table of all."""
