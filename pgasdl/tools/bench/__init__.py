"""``pgasdl bench``: pgasdl, the machine's floor and the peers take turns in one session."""
