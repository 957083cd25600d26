"""``pgasdl bench``: ours, the machine's floor and the peers, taking turns in one session."""
