"""``pgasdl bench``: pgasdl and the machine's floor take turns in one session."""
